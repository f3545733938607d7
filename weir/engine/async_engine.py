"""The engine as asyncio sees it: streams, prefills and claims, over the one thread that owns torch.

The loop's side of a sequence is its `_Subscription`; once that is closed, no news of the sequence reaches its reader,
whatever is still on the way from the thread. So an abort is final the moment it returns.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from weir.core.block_hash import BlockHash
from weir.core.deadline import Clock
from weir.core.errors import ConflictError, RequestCancelledError, UnavailableError
from weir.core.kv_layout import KvLayout, LayoutFingerprint
from weir.core.model_card import ModelCard
from weir.core.request import FirstToken, RequestId, SequenceRequest
from weir.engine.block_access import BlockAccess, InPlaceBlocks
from weir.engine.block_copies import BlockCopies
from weir.engine.block_staging import StagedBlocks
from weir.engine.claim import Denial, Grant, ImportTarget
from weir.engine.config import EngineConfig
from weir.engine.engine import Engine
from weir.engine.engine_thread import EngineThread
from weir.engine.kv_events import KvEvents
from weir.engine.memory_sharing import MemorySharing, open_sharing
from weir.engine.outbox import News
from weir.engine.paged_kv_cache import PagedKvCache
from weir.engine.prefill_run import PrefillProgress, PrefillRun
from weir.engine.sequence import PrefillChoice
from weir.engine.shared_blocks import SharedBlocks
from weir.engine.stats import EngineStats
from weir.engine.step_computation import Runner, load_model_runner
from weir.engine.token_stream import SequenceNews, TokenStream

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Subscription:
    """Who reads the news of one sequence. Used on the loop only; the engine carries it as the sequence's reader."""

    request_id: RequestId
    sequence_id: str
    reader: TokenStream | PrefillRun
    is_open: bool = True


class AsyncEngine:
    """One engine, as an async context manager.

    Entering loads the model off the loop and raises ModelLoadError or ConfigError as they come. After a failure of the
    engine itself every sequence and every call ends with an error and `stats().failure` says why.

    Args:
        load_runner: makes the model; called in the engine's thread.
        make_copies: makes what copies blocks of that device to the host and back.
        open_sharing: see `weir.engine.memory_sharing`.
        clock: the one that deadlines are on.

    Attributes:
        blocks: the memory of its blocks, for those who bring KV to other workers or from them.
        shared: the same, for workers of the same host that map it; None where they do not.
    """

    blocks: BlockAccess
    shared: SharedBlocks | None
    card: ModelCard
    layout: KvLayout
    fingerprint: LayoutFingerprint
    max_model_len: int
    num_blocks: int

    def __init__(
        self,
        config: EngineConfig,
        *,
        load_runner: Callable[[EngineConfig], Runner] = load_model_runner,
        make_copies: Callable[[torch.device], BlockCopies] = BlockCopies,
        open_sharing: Callable[[str, PagedKvCache, StagedBlocks], MemorySharing] = open_sharing,
        clock: Clock = time.monotonic,
    ) -> None:
        self._thread = EngineThread(config, load_runner=load_runner, deliver=self._dispatch, clock=clock)
        self._config = config
        self._make_copies = make_copies
        self._open_sharing = open_sharing
        self._subscriptions: dict[str, _Subscription] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> AsyncEngine:
        await self._thread.start()
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._thread.stop)
            runner = self._thread.engine.runner
            await self._open_blocks(runner.cache, stack)
            self._stack = stack.pop_all()
        self.card, self.layout = runner.card, runner.layout
        self.fingerprint = runner.layout.fingerprint(runner.weights_hash)
        self.max_model_len, self.num_blocks = runner.max_model_len, runner.num_blocks
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Ends after the step under way; whoever still waits for a sequence gets an error."""
        await self._stack.aclose()

    # Sequences whose prompt is computed here

    def open_stream(self) -> TokenStream:
        """A reader for the news of any number of sequences; closing it aborts them."""
        return TokenStream(self._abort_readers_of)

    async def submit(self, request: SequenceRequest, stream: TokenStream) -> None:
        """Compute the prompt, then decode; the news go to `stream`.

        Raises:
            ConflictError, InvalidRequestError: see `Engine.submit`.
            UnavailableError: the engine cannot go on, or has stopped.
        """
        subscription = self._subscribe(request, stream)
        await self._enter(subscription, lambda engine: engine.submit(request, subscription))

    async def prefill(self, request: SequenceRequest, choices: tuple[PrefillChoice, ...]) -> PrefillRun:
        """Compute the prompt once for all `choices`; the run tells how far it is.

        Each choice's hold keeps the blocks from the start until `release_hold`, whatever becomes of the run.

        Raises:
            ConflictError, InvalidRequestError: see `Engine.prefill`.
            UnavailableError: the engine cannot go on, or has stopped.
        """
        run = PrefillRun(lambda: self._abort(subscription))
        subscription = self._subscribe(request, run)
        await self._enter(subscription, lambda engine: engine.prefill(request, choices, subscription))
        return run

    def release_hold(self, hold_id: str) -> None:
        """End the hold of one choice. Idempotent; unknown ids are ignored."""
        self._thread.post(lambda engine: engine.release_hold(hold_id))

    # Sequences whose KV comes from elsewhere

    async def claim(self, request: SequenceRequest, stream: TokenStream) -> Grant | Denial:
        """Promise a seat and blocks; see `Engine.claim`.

        Raises:
            ConflictError, InvalidRequestError: see `Engine.claim`.
            UnavailableError: the engine cannot go on, or has stopped.
        """
        subscription = self._subscribe(request, stream)
        answer = await self._enter(subscription, lambda engine: engine.claim(request, subscription))
        if isinstance(answer, Denial):
            self._unsubscribe(subscription)
        return answer

    async def allocate_claimed(self, sequence_id: str) -> ImportTarget:
        """Turn a claim into blocks to write to; see `Engine.allocate_claimed`."""
        return await self._thread.call(lambda engine: engine.allocate_claimed(sequence_id))

    async def activate(self, sequence_id: str, first_token: FirstToken, num_cached_tokens: int) -> None:
        """All KV is in place and nobody writes any more: join the next step; see `Engine.activate`."""
        await self._thread.call(lambda engine: engine.activate(sequence_id, first_token, num_cached_tokens))

    async def release_claim(self, sequence_id: str) -> None:
        """Give up a claim or an import whose blocks nobody writes any more; see `Engine.release_claim`."""
        subscription = self._subscriptions.get(sequence_id)
        try:
            await self._thread.call(lambda engine: engine.release_claim(sequence_id))
        except UnavailableError:
            pass  # an engine that has ended has no claim
        except asyncio.CancelledError:
            self.abort(sequence_id)  # the release itself is on its way
            raise
        if subscription is not None:
            self._unsubscribe(subscription)

    # Endings

    def abort(self, sequence_id: str) -> None:
        """End a sequence in any state; its reader hears no more of it. Unknown ids are ignored.

        A prefill's run ends with RequestCancelledError. The blocks of an import stay until `release_claim` or
        `activate`.
        """
        subscription = self._subscriptions.get(sequence_id)
        if subscription is not None:
            self._abort(subscription)

    def abort_request(self, request_id: RequestId) -> int:
        """End every sequence of a request; how many there were."""
        found = [item for item in self._subscriptions.values() if item.request_id == request_id]
        for subscription in found:
            self._abort(subscription)
        return len(found)

    # Facts

    def stats(self) -> EngineStats:
        """The newest snapshot; never waits."""
        return self._thread.engine.stats

    def take_iteration_tokens(self) -> tuple[int, ...]:
        """How many tokens each step computed since the last call; never waits."""
        return self._thread.engine.meter.take_iteration_tokens()

    async def kv_events(self) -> KvEvents:
        """Wait for changes of the prefix cache. The first answer is its whole content; one reader at a time.

        Raises:
            UnavailableError: the engine cannot go on, or has stopped.
        """
        return await self._thread.kv_events()

    async def kv_snapshot(self) -> tuple[BlockHash, ...]:
        """Hashes of all cached blocks."""
        return await self._thread.call(lambda engine: engine.kv_snapshot())

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing changed, while any block is in use."""
        return await self._thread.call(lambda engine: engine.reset_prefix_cache())

    async def check_integrity(self) -> None:
        """Raises AssertionError: says which law of the engine is broken."""
        await self._thread.call(lambda engine: engine.check_integrity())

    async def _open_blocks(self, cache: PagedKvCache, stack: AsyncExitStack) -> None:
        self.shared = None
        way = self._config.transfer_memory
        if cache.is_in_host_memory:
            if way != "none":
                logger.warning("transfer_memory: %r is for KV on a GPU; here frames carry it", way)
            self.blocks = InPlaceBlocks(cache)
            return
        device, size_bytes = cache.tensor.device, self._config.transfer_staging_bytes
        staged = StagedBlocks(cache, self._make_copies(device), size_bytes=size_bytes, on_failure=self._thread.fail)
        self.blocks = await stack.enter_async_context(staged)
        if way != "none":
            sharing = await asyncio.to_thread(self._open_sharing, way, cache, staged)
            stack.callback(sharing.close)
            self.shared = SharedBlocks(cache, sharing, staged)

    def _subscribe(self, request: SequenceRequest, reader: TokenStream | PrefillRun) -> _Subscription:
        if request.sequence_id in self._subscriptions:
            raise ConflictError(f"sequence {request.sequence_id!r} exists")
        if isinstance(reader, TokenStream) and reader.is_closed:
            raise RequestCancelledError("the stream of this sequence is closed")
        subscription = _Subscription(request.request_id, request.sequence_id, reader)
        self._subscriptions[request.sequence_id] = subscription
        return subscription

    def _unsubscribe(self, subscription: _Subscription) -> None:
        if subscription.is_open:
            subscription.is_open = False
            del self._subscriptions[subscription.sequence_id]

    async def _enter(self, subscription: _Subscription, command: Callable[[Engine], T]) -> T:
        try:
            return await self._thread.call(command)
        except asyncio.CancelledError:
            self._abort(subscription)
            raise
        except BaseException:
            self._unsubscribe(subscription)
            raise

    def _abort(self, subscription: _Subscription) -> None:
        if not subscription.is_open:
            return
        self._unsubscribe(subscription)
        sequence_id, reader = subscription.sequence_id, subscription.reader
        self._thread.post(lambda engine: engine.abort(sequence_id))
        if isinstance(reader, TokenStream):
            reader.forget(sequence_id)
        else:
            reader.put(RequestCancelledError(f"sequence {sequence_id!r} was aborted"))

    def _abort_readers_of(self, stream: TokenStream) -> None:
        for subscription in [item for item in self._subscriptions.values() if item.reader is stream]:
            self._abort(subscription)

    def _dispatch(self, news: list[tuple[Any, News]]) -> None:
        for subscription, item in news:
            if subscription.is_open:
                if _is_last(item):
                    self._unsubscribe(subscription)
                subscription.reader.put(item)


def _is_last(item: News) -> bool:
    match item:
        case SequenceNews():
            return item.is_last
        case PrefillProgress():
            return item.first_tokens is not None
        case _:
            return True


__all__ = ["AsyncEngine", "Denial", "Grant", "ImportTarget", "KvEvents", "PrefillProgress", "PrefillRun"]
