"""A prefill worker and decode workers `d` and `e` on a memory network, in virtual time: for laws of the two ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

from kv_transfer.offer import Offer
from kv_transfer.receiver import TransferClient
from kv_transfer.sender import TransferServer
from kv_transfer.settings import ReceiverConfig, SenderConfig
from kv_transfer.transfer_state import EndReason, Received, Seal
from tests.fakes.kv_blocks import FakeSink, FakeSource
from tests.fakes.memory_transport import MemoryNetwork
from tests.fakes.virtual_loop import run_virtual, virtual_clock
from tests.kv_transfer.identities import FIRST_TOKEN, LAYOUT, make_identity, make_key
from weir.core.deadline import Deadline
from weir.core.request import HandoffKey

NUM_TOKENS = 40


class World:
    """Everything is up while it is entered."""

    def __init__(self, sender: SenderConfig | None = None, receiver: ReceiverConfig | None = None) -> None:
        self.network = MemoryNetwork()
        self.server = TransferServer(make_identity("p"), ["p"], sender, transport=self.network, clock=virtual_clock)
        self.clients = {
            name: TransferClient(make_identity(name), receiver, transport=self.network, clock=virtual_clock)
            for name in ("d", "e")
        }
        self.ended: list[tuple[HandoffKey, EndReason]] = []
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self.server)
        for client in self.clients.values():
            await self._stack.enter_async_context(client)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def offer(
        self,
        key: HandoffKey | None = None,
        *,
        decode: str = "d",
        deadline: Deadline | None = None,
        is_sealed: bool = True,
    ) -> Offer:
        source = FakeSource(LAYOUT, NUM_TOKENS)

        def on_end(key: HandoffKey, reason: EndReason) -> None:
            self.ended.append((key, reason))
            source.close()

        offer = self.server.offer(
            key or make_key(),
            decode_incarnation=f"{decode}-1" if decode else "",
            adapter="",
            source=source,
            deadline=deadline or Deadline.never(),
            on_end=on_end,
        )
        if is_sealed:
            offer.seal(Seal(num_tokens=NUM_TOKENS, first_token=FIRST_TOKEN))
        return offer

    async def fetch(
        self,
        key: HandoffKey | None = None,
        *,
        by: str = "d",
        sink_ready: Callable[[], Awaitable[FakeSink]] | None = None,
        timeout_s: float = 1000.0,
        address: str = "p",
    ) -> Received:
        async def ready() -> FakeSink:
            return FakeSink(LAYOUT, NUM_TOKENS)

        return await self.clients[by].fetch(
            address=address,
            incarnation="p-1",
            key=key or make_key(),
            adapter="",
            skip_tokens=0,
            sink_ready=sink_ready or ready,
            deadline=Deadline.after(timeout_s, virtual_clock),
        )


def in_world(
    law: Callable[[World], Coroutine[Any, Any, None]],
    *,
    sender: SenderConfig | None = None,
    receiver: ReceiverConfig | None = None,
) -> World:
    """Run a law; returns the world after it was left."""

    async def main() -> World:
        async with World(sender, receiver) as world:
            await law(world)
            await asyncio.sleep(0.01)
        return world

    return run_virtual(main())
