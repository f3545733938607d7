"""The state of every request, as its gateway writes it and anybody reads it.

    QUEUED -> PREFILLING -> SEALED -> DECODING -> DONE | FAILED | CANCELLED

Only the owning gateway writes, through one compare-and-set in Redis (`is_accepted` is its rule). Nothing waits for a
write; nothing here decides what a request does next.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict, dataclass, field
from enum import Enum
from types import TracebackType
from typing import Self

from weir.cluster import keys
from weir.cluster.connection import RedisConnection, ScriptCall
from weir.cluster.scripts import GET_REQUEST, RECORD_REQUEST
from weir.cluster.write_queue import WriteQueue, WriteQueueStats
from weir.core.deadline import Clock, Deadline
from weir.core.errors import WeirError
from weir.core.json_fields import value_from_fields
from weir.core.request import FinishReason, RequestId
from weir.core.worker import WorkerId

logger = logging.getLogger(__name__)


class RequestState(Enum):
    QUEUED = "queued"
    PREFILLING = "prefilling"
    SEALED = "sealed"
    DECODING = "decoding"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_terminal(self) -> bool:
        return self in _TERMINAL

    @property
    def rank(self) -> int:
        """Position in the life of one epoch; the terminal states share the last."""
        return _RANK[self]


_TERMINAL = frozenset({RequestState.DONE, RequestState.FAILED, RequestState.CANCELLED})
_RANK = {state: min(index, 4) for index, state in enumerate(RequestState)}


@dataclass(frozen=True, slots=True, kw_only=True)
class HopTimings:
    """Seconds that a request spent in each hop; None for a hop it has not left.

    Attributes:
        queue_s: in admission and in the queue of the worker that computed the prompt.
        transfer_s: from the open of the hand-off to its commit.
        first_token_s: from arrival to the first token sent.
        total_s: from arrival to the end.
    """

    queue_s: float | None = None
    prefill_s: float | None = None
    transfer_s: float | None = None
    first_token_s: float | None = None
    decode_s: float | None = None
    total_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFailure:
    """Why a request failed. `hop` is where: gateway, prefill, transfer or decode."""

    hop: str
    code: str
    message: str

    @classmethod
    def from_error(cls, error: WeirError) -> RequestFailure:
        return cls(hop=error.hop or "gateway", code=error.code, message=error.message)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """Everything known of a request at one moment; each record replaces the one before.

    Attributes:
        owner: id of the gateway that serves it.
        epoch: attempt number; grows at every re-dispatch.
        created_s: Unix time of arrival.
        prefill_worker: None if the decode worker computes the prompt itself.
        finish_reasons: one for each choice that has ended.
    """

    request_id: RequestId
    owner: str
    state: RequestState
    epoch: int = 0
    model: str = ""
    label: str = ""
    created_s: int = 0
    prefill_worker: WorkerId | None = None
    decode_worker: WorkerId | None = None
    deadline: Deadline = field(default_factory=Deadline.never)
    num_choices: int = 1
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    finish_reasons: tuple[FinishReason, ...] = ()
    timings: HopTimings = field(default_factory=HopTimings)
    failure: RequestFailure | None = None

    def to_json(self) -> str:
        """Without the deadline: it is a point on the writer's clock, and travels as the time that remains."""
        fields = asdict(self)
        del fields["deadline"]
        fields["state"] = self.state.value
        fields["finish_reasons"] = [reason.value for reason in self.finish_reasons]
        return json.dumps(fields, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes, *, deadline: Deadline) -> RequestRecord:
        """Of this version or a neighbour; raises ValueError for anything else."""
        return value_from_fields(cls, json.loads(text), deadline=deadline)


def is_accepted(stored: RequestRecord, new: RequestRecord) -> bool:
    """The rule of every move: not out of a terminal state, not by another gateway, and (epoch, rank) grows.

    Ranks may be skipped; the next epoch starts at QUEUED again. With nothing stored every record is accepted.
    """
    return (
        not stored.state.is_terminal
        and stored.owner == new.owner
        and (new.epoch, new.state.rank) > (stored.epoch, stored.state.rank)
    )


class RequestJournal:
    """An async context manager.

    Args:
        keep_s: how long the record of a request that has ended can be read; also how long one outlives its deadline.
        max_lifetime_s: the same for a request that has no deadline and does not move.
        max_pending: most requests whose newest record waits for Redis.
    """

    def __init__(
        self,
        connection: RedisConnection,
        *,
        clock: Clock = time.monotonic,
        keep_s: float = 600.0,
        max_lifetime_s: float = 86_400.0,
        max_pending: int = 10_000,
    ) -> None:
        self._connection = connection
        self._clock = clock
        self._keep_s = keep_s
        self._max_lifetime_s = max_lifetime_s
        self._queue: WriteQueue[RequestRecord] = WriteQueue(
            connection, self._encode, should_replace=is_accepted, max_pending=max_pending
        )

    @property
    def stats(self) -> WriteQueueStats:
        return self._queue.stats

    async def __aenter__(self) -> Self:
        await self._queue.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._queue.__aexit__(kind, error, traceback)

    def record(self, record: RequestRecord) -> None:
        """Queue a record; never waits. Of one request only the newest waits for Redis."""
        self._queue.put(record.request_id, record)

    async def wait_until_sent(self) -> None:
        """Until Redis has every record, however long it is away; give it a time-out."""
        await self._queue.wait_until_sent()

    async def get(self, request_id: RequestId) -> RequestRecord | None:
        """The newest record that Redis has, its deadline moved to this process's clock.

        Raises:
            UnavailableError: Redis is away.
        """
        reply = await self._connection.run_script(GET_REQUEST, [keys.request(request_id)])
        if reply is None:
            return None
        text, remaining_ms = reply
        remaining_s = int(remaining_ms) / 1000 if remaining_ms else None
        deadline = Deadline.never() if remaining_s is None else Deadline.after(remaining_s, self._clock)
        return RequestRecord.from_json(text, deadline=deadline)

    def _encode(self, record: RequestRecord) -> tuple[ScriptCall, ...]:
        remaining_ms = record.deadline.remaining_ms(self._clock)
        if record.state.is_terminal:
            ttl_s = self._keep_s
        elif remaining_ms:
            ttl_s = min(remaining_ms / 1000 + self._keep_s, self._max_lifetime_s)
        else:
            ttl_s = self._max_lifetime_s
        args = (
            record.owner,
            record.epoch,
            record.state.rank,
            int(record.state.is_terminal),
            record.to_json(),
            remaining_ms or "",
            max(1, int(ttl_s * 1000)),
        )
        return (ScriptCall(script=RECORD_REQUEST, keys=(keys.request(record.request_id),), args=args),)
