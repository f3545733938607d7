"""The loops of one component: started inside its `async with`, all ended when it is left."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self


class OwnedTasks:
    """A task group whose exit cancels what still runs. A task that raises ends the body that owns it, too."""

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        if error is None or isinstance(error, asyncio.CancelledError):
            await self._group.__aexit__(kind, error, traceback)
        else:  # the body's own error leaves as it is, not wrapped in a group
            await self._group.__aexit__(None, None, None)

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` until it ends or the owner is left."""
        task = self._group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
