"""Work for one client, for as long as that client is there.

A client that leaves cancels its work at once, whether or not anything was sent to it yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import NoReturn

from starlette.types import Receive


class ClientGoneError(Exception):
    """The client left, or takes no bytes any more; there is nobody to answer."""


async def while_connected(receive: Receive, work: Awaitable[None]) -> None:
    """Await `work`; cancel it when the client leaves.

    Args:
        receive: the ASGI channel of a request whose body was read to its end.

    Raises:
        BaseExceptionGroup: holds ClientGoneError, or what `work` raised.
    """
    async with asyncio.TaskGroup() as group:
        watch = group.create_task(_raise_when_gone(receive))
        await work
        watch.cancel()


def find_client_gone(exc: BaseException) -> ClientGoneError | None:
    """The ClientGoneError that `exc` is, or that is in it if it is a group; else None."""
    if isinstance(exc, BaseExceptionGroup):
        found = (find_client_gone(inner) for inner in exc.exceptions)
        return next((gone for gone in found if gone is not None), None)
    return exc if isinstance(exc, ClientGoneError) else None


async def _raise_when_gone(receive: Receive) -> NoReturn:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError("the client closed the connection")
