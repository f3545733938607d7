"""A prefill worker of its own process, to be killed or stopped: offers one hand-off that is never sealed."""

from __future__ import annotations

import asyncio
import sys

from kv_transfer.sender import TransferServer
from kv_transfer.settings import SenderConfig
from tests.fakes.kv_blocks import FakeSource
from tests.kv_transfer.identities import LAYOUT, make_identity, make_key
from weir.core.deadline import Deadline


async def main() -> None:
    async with TransferServer(make_identity("p"), [sys.argv[1]], SenderConfig()) as server:
        offer = server.offer(
            make_key(),
            decode_incarnation="d-1",
            adapter="",
            source=FakeSource(LAYOUT, 160),
            deadline=Deadline.never(),
            on_end=lambda *_: None,
        )
        offer.extend(5)
        print(server.addresses[0], flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
