"""A prefill and a decode worker in one process, over a real transfer, with the test in the gateway's place."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from prometheus_client import CollectorRegistry

from decode_service.events import Denied, Failed, Granted, HandoffSource, OpenSequence, Tokens
from decode_service.handoff import HandoffImporter
from decode_service.session import Session
from decode_service.worker import DecodeWorker
from kv_transfer.handshake import TransferIdentity
from kv_transfer.receiver import TransferClient
from kv_transfer.sender import TransferServer
from kv_transfer.settings import ReceiverConfig, SenderConfig
from prefill_service.held_blocks import HeldBlockBudget
from prefill_service.worker import HandoffChoice, PrefillResult, PrefillWorker
from tests.fakes.ownership import FakeOwnership
from weir.core.deadline import Deadline
from weir.core.errors import WeirError
from weir.core.request import (
    FinishReason,
    HandoffId,
    HandoffKey,
    HandoffTimings,
    RequestId,
    SamplingParams,
    SequenceRequest,
    TokenLogprobs,
)
from weir.core.worker import Incarnation, Role, WorkerId
from weir.engine.async_engine import AsyncEngine
from weir.engine.block_staging import StagedBlocks
from weir.runtime.metrics import WorkerMetrics

T = TypeVar("T")

PREFILL = Incarnation("prefill-1")
DECODE = Incarnation("decode-1")
WAIT_S = 20.0
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)

_numbers = itertools.count(1)


async def within(awaitable: Awaitable[T], timeout_s: float = WAIT_S) -> T:
    """The result, or a failed test instead of one that hangs."""
    async with asyncio.timeout(timeout_s):
        return await awaitable


async def until(is_so: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
    """Wait for what has no event of its own: a figure of another thread or process."""
    async with asyncio.timeout(timeout_s):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def identity(engine: AsyncEngine, name: str, incarnation: Incarnation) -> TransferIdentity:
    return TransferIdentity(
        worker_id=WorkerId(name),
        incarnation=incarnation,
        layout=engine.layout,
        fingerprint=engine.fingerprint,
        secret=b"secret",
        memory_domain="" if engine.shared is None else engine.shared.domain,
    )


@dataclass
class Stream:
    """What a gateway has heard of one sequence; `first` is what prefill gave it."""

    key: HandoffKey
    stream_id: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    granted: Granted | None = None
    denied: Denied | None = None
    error: WeirError | None = None
    finish_reason: FinishReason | None = None
    timings: HandoffTimings | None = None
    num_cached_tokens: int = 0
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    _grown: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, event: Granted | Denied | Tokens | Failed) -> None:
        assert not self.ended.is_set(), f"{event} after the end"
        match event:
            case Granted():
                self.granted = event
            case Denied():
                self.denied = event
                self.ended.set()
            case Failed():
                self.error = event.error
                self.ended.set()
            case Tokens():
                delta = event.delta
                assert self.granted is not None, "tokens before the grant"
                assert delta.first_index == len(self.token_ids), "a token is repeated or lost"
                self.token_ids.extend(delta.token_ids)
                self.logprobs.extend(delta.logprobs)
                self.timings = event.timings or self.timings
                self.num_cached_tokens = delta.num_cached_tokens
                self._grown.set()
                if delta.finish_reason is not None:
                    self.finish_reason = delta.finish_reason
                    self.ended.set()
        self.answered.set()

    async def has_tokens(self, count: int) -> None:
        while len(self.token_ids) < count:
            self._grown.clear()
            await within(self._grown.wait())


class Gateway:
    """One session with the decode worker."""

    def __init__(self, session: Session, group: asyncio.TaskGroup) -> None:
        self.session = session
        self.streams: dict[int, Stream] = {}
        self.message_sizes: list[int] = []
        self._reader = group.create_task(self._read())

    def open(
        self,
        request: SequenceRequest,
        key: HandoffKey,
        source: HandoffSource | None,
        *,
        incarnation: Incarnation = DECODE,
    ) -> Stream:
        stream = Stream(key, next(_numbers))
        self.streams[stream.stream_id] = stream
        self.session.open(
            OpenSequence(stream_id=stream.stream_id, key=key, request=request, source=source, incarnation=incarnation)
        )
        return stream

    def cancel(self, stream: Stream) -> None:
        self.session.cancel(stream.stream_id)
        del self.streams[stream.stream_id]

    async def _read(self) -> None:
        while events := await self.session.read():
            self.message_sizes.append(len(events))
            for event in events:
                self.streams[event.stream_id].take(event)


class WorkerPair:
    """An async context manager over two engines that are entered already.

    Args:
        listen: where the prefill worker serves blocks.
        wait_s: longest time for one request, and for the rest after the last.
    """

    def __init__(
        self,
        prefill_engine: AsyncEngine,
        decode_engine: AsyncEngine,
        *,
        listen: str = "tcp://127.0.0.1:0",
        lease_s: float = 30.0,
        max_held_blocks: int | None = None,
        max_waiting: int = 64,
        max_queue_s: float = 10.0,
        sender: SenderConfig | None = None,
        receiver: ReceiverConfig | None = None,
        wait_s: float = WAIT_S,
    ) -> None:
        self._wait_s = wait_s
        self.prefill_engine = prefill_engine
        self.decode_engine = decode_engine
        self.ownership = FakeOwnership()
        self.server = TransferServer(
            identity(prefill_engine, "p", PREFILL),
            [listen],
            sender or SenderConfig(lease_s=lease_s),
            export_memory=None if prefill_engine.shared is None else prefill_engine.shared.export,
        )
        self.client = TransferClient(
            identity(decode_engine, "d", DECODE),
            receiver,
            map_memory=None if decode_engine.shared is None else decode_engine.shared.map,
        )
        self.prefill = PrefillWorker(
            prefill_engine,
            self.server,
            self.ownership,  # type: ignore[arg-type]
            incarnation=PREFILL,
            budget=HeldBlockBudget(max_held_blocks or prefill_engine.num_blocks, max_waiting=max_waiting),
            max_queue_s=max_queue_s,
            lease_s=lease_s,
        )
        self.metrics = WorkerMetrics(
            CollectorRegistry(), model_name="tiny", role=Role.DECODE, max_num_batched_tokens=256
        )
        self.decode = DecodeWorker(
            decode_engine,
            HandoffImporter(
                decode_engine,
                self.client,
                self.ownership,  # type: ignore[arg-type]
                metrics=self.metrics,
            ),
            self.ownership,  # type: ignore[arg-type]
            incarnation=DECODE,
            max_waiting=max_waiting,
        )
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.server)
            await stack.enter_async_context(self.client)
            self.group = await stack.enter_async_context(asyncio.TaskGroup())
            session = await stack.enter_async_context(self.decode.session("gateway-1"))
            self.gateway = Gateway(session, self.group)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        await self._stack.__aexit__(*exc_info)

    @property
    def source(self) -> HandoffSource:
        return HandoffSource(worker_id=WorkerId("p"), incarnation=PREFILL, transfer_address=self.server.addresses[0])

    def request(
        self,
        prompt: tuple[int, ...],
        sampling: SamplingParams = GREEDY,
        *,
        request_id: str | None = None,
        choice_index: int = 0,
        epoch: int = 0,
        **fields: Any,
    ) -> tuple[SequenceRequest, HandoffKey]:
        """One choice of a prompt and the key of its hand-off."""
        name = request_id or f"request-{next(_numbers)}"
        key = HandoffKey(HandoffId(f"{name}:{choice_index}"), epoch)
        request = SequenceRequest(
            request_id=RequestId(name),
            sequence_id=f"{key.handoff_id}/{epoch}",
            prompt_token_ids=prompt,
            sampling=sampling,
            choice_index=choice_index,
            **fields,
        )
        return request, key

    async def start_prefill(
        self, request: SequenceRequest, *keys: HandoffKey, decode: Incarnation = DECODE
    ) -> PrefillResult:
        choices = tuple(
            HandoffChoice(choice_index=index, key=key, decode_incarnation=decode) for index, key in enumerate(keys)
        )
        return await self.prefill.prefill(request, choices, incarnation=PREFILL)

    async def generate(
        self, prompt: tuple[int, ...], sampling: SamplingParams = GREEDY, *, n: int = 1, **fields: Any
    ) -> tuple[PrefillResult, list[Stream]]:
        """Open and prefill at the same time, as the gateway does; returns when every choice has ended."""
        name = f"request-{next(_numbers)}"
        opened = [self.request(prompt, sampling, request_id=name, choice_index=index, **fields) for index in range(n)]
        streams = [self.gateway.open(request, key, self.source) for request, key in opened]
        request = opened[0][0]
        result = await within(self.start_prefill(request, *(stream.key for stream in streams)), self._wait_s)
        for stream, first in zip(streams, result.first_tokens, strict=True):
            if first.finish_reason is None:
                await within(stream.ended.wait(), self._wait_s)
            else:
                self.gateway.cancel(stream)
                stream.token_ids, stream.finish_reason = [first.token_id], first.finish_reason
        return result, streams

    async def assert_at_rest(self) -> None:
        """Both pools at their baseline, no hold, no transfer, no slot taken, no holding recorded; every law holds."""
        for engine in (self.prefill_engine, self.decode_engine):
            await until(lambda engine=engine: is_at_rest(engine), self._wait_s)  # type: ignore[misc]
            await engine.check_integrity()
            if isinstance(blocks := engine.blocks, StagedBlocks):
                await until(lambda blocks=blocks: blocks.num_free_slots == blocks.num_slots)  # type: ignore[misc]
        await until(lambda: self.server.num_unreleased == 0, self._wait_s)
        assert self.prefill.num_held == self.prefill.num_held_blocks == 0
        assert self.decode.num_open == self.client.num_in_flight == 0
        assert self.ownership.holdings == {}


def is_at_rest(engine: AsyncEngine) -> bool:
    stats = engine.stats()
    is_empty = stats.num_running == stats.num_waiting == stats.num_importing == stats.num_holds == 0
    return is_empty and stats.free_blocks == stats.total_blocks


async def generate_alone(
    engine: AsyncEngine, prompt: tuple[int, ...], sampling: SamplingParams = GREEDY, *, choice_index: int = 0
) -> list[int]:
    """What one engine doing both answers."""
    stream = engine.open_stream()
    try:
        request = SequenceRequest(
            request_id=RequestId("alone"),
            sequence_id=f"alone-{next(_numbers)}",
            prompt_token_ids=prompt,
            sampling=sampling,
            choice_index=choice_index,
            deadline=Deadline.after(WAIT_S * 3),
        )
        await engine.submit(request, stream)
        token_ids: list[int] = []
        while True:
            for news in await within(stream.read()):
                if news.error is not None:
                    raise news.error
                if news.delta is not None:
                    token_ids.extend(news.delta.token_ids)
                if news.is_last:
                    return token_ids
    finally:
        stream.close()
