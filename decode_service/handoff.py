"""Brings the KV of one claimed sequence from its prefill worker into the engine.

The claim's blocks are given back only after the fetch has ended, when nobody writes them any more (handoff.md, rule 1).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from decode_service.events import HandoffSource
from decode_service.sink import EngineBlockSink
from kv_transfer.blocks import BlockSink
from kv_transfer.transfer_state import Received
from weir.cluster.block_ownership import BlockGroup
from weir.core.errors import TransferProtocolError, WeirError
from weir.core.request import HandoffKey, SequenceRequest
from weir.runtime.metrics import WorkerMetrics
from weir.runtime.tracing import tracer

if TYPE_CHECKING:
    from kv_transfer.receiver import TransferClient
    from weir.cluster.block_ownership import OwnershipRecorder
    from weir.engine.async_engine import AsyncEngine
    from weir.engine.claim import ImportTarget


class HandoffImporter:
    """Fetches, verifies and activates; one engine, one transfer client."""

    def __init__(
        self,
        engine: AsyncEngine,
        client: TransferClient,
        ownership: OwnershipRecorder,
        *,
        metrics: WorkerMetrics,
    ) -> None:
        self._engine = engine
        self._client = client
        self._ownership = ownership
        self._metrics = metrics
        self._siblings: dict[tuple[str, tuple[int, ...]], asyncio.Event] = {}

    async def run(
        self, key: HandoffKey, request: SequenceRequest, source: HandoffSource, *, num_cached_tokens: int
    ) -> Received:
        """Bring in a sequence that the engine has claimed, and let it join the next step.

        However it fails, the claim is released.

        Args:
            num_cached_tokens: what the claim found in the prefix cache.

        Raises:
            HandoffLostError, WrongIncarnationError, FingerprintMismatchError, TransferProtocolError, WorkerLostError,
            DeadlineExceededError: see `TransferClient.fetch`.
        """
        try:
            with tracer().start_as_current_span("handoff"):
                received = await self._import(key, request, source, num_cached_tokens)
        except WeirError as error:
            error.hop = error.hop or "transfer"
            raise
        self._metrics.handoff_seconds.observe(received.transfer_s)
        return received

    async def _import(
        self, key: HandoffKey, request: SequenceRequest, source: HandoffSource, num_cached_tokens: int
    ) -> Received:
        async with self._after_sibling(request) as has_waited:
            try:
                received = await self._fetch(key, request, source, num_cached_tokens, allocates_first=has_waited)
            except BaseException:
                await self._engine.release_claim(request.sequence_id)
                raise
            seal = received.seal
            await self._engine.activate(request.sequence_id, seal.first_token, seal.num_cached_tokens)
            return received

    async def _fetch(
        self,
        key: HandoffKey,
        request: SequenceRequest,
        source: HandoffSource,
        num_cached_tokens: int,
        *,
        allocates_first: bool,
    ) -> Received:
        target: ImportTarget | None = None

        async def sink_ready() -> BlockSink:
            nonlocal target
            if target is None:
                target = await self._allocate(key, request)
            return EngineBlockSink(self._engine, target)

        if allocates_first:  # so that what the sibling has brought is matched, and not fetched again
            target = await self._allocate(key, request)
            num_cached_tokens = target.num_cached_tokens
        received = await self._client.fetch(
            address=source.transfer_address,
            incarnation=source.incarnation,
            key=key,
            adapter=request.adapter,
            skip_tokens=num_cached_tokens,
            sink_ready=sink_ready,
            deadline=request.deadline,
        )
        if received.seal.num_tokens != request.num_known_tokens:
            raise TransferProtocolError(
                f"the hand-off has {received.seal.num_tokens} tokens, the sequence {request.num_known_tokens}",
                hop="transfer",
            )
        return received

    async def _allocate(self, key: HandoffKey, request: SequenceRequest) -> ImportTarget:
        target = await self._engine.allocate_claimed(request.sequence_id)
        groups = (BlockGroup(first_block=0, num_blocks=len(target.block_ids)),)
        self._ownership.record_destination(request.request_id, key, groups, request.deadline)
        return target

    @asynccontextmanager
    async def _after_sibling(self, request: SequenceRequest) -> AsyncIterator[bool]:
        """Hold back a choice while another of the same prompt brings its blocks in; gives whether it did."""
        name = (request.request_id, request.prompt_token_ids)
        sibling = self._siblings.get(name)
        if sibling is not None:
            await sibling.wait()
            yield True
            return
        self._siblings[name] = asyncio.Event()
        try:
            yield False
        finally:
            self._siblings.pop(name).set()
