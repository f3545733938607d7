"""Chooses the workers of a request: a pure function of a fleet, prefix overlaps and what is in flight.

It knows no network and no clock, and it changes nothing. Costs are in tokens: what a worker would compute or receive
for this request, and what stands before it. Of many workers only a few are looked at, those with the longest prefix
and a sample of the rest, so that a choice among 1,000 costs what one among 20 does.
Source: Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", IEEE TPDS 12(10), 2001 (the sample).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from zlib import crc32

from gateway.fleet import Fleet, ModelFleet
from gateway.in_flight import InFlightLedger
from weir.core.errors import CapacityExceededError, NoWorkerError
from weir.core.request import RequestId
from weir.core.worker import Incarnation, WorkerId, WorkerInfo

SAMPLE_SIZE = 12
"""Workers of a role that are looked at for one choice; a role with no more is searched whole."""

NUM_BEST_PREFIXES = 4
"""Workers with the longest prefix that are looked at beside the sample."""

SEQUENCE_COST = 64.0
"""Tokens that one more sequence on a decode worker weighs as much as: it slows down every step there."""

FULL_POOL_COST = 1024.0
"""Tokens that a decode worker's full pool weighs as much as, against an empty one."""

DOES_NOT_FIT_COST = 1e9
"""Added where the known tokens do not fit into the free blocks: chosen only when they fit nowhere."""

RETRY_AFTER_S = 2.0
"""What clients are told when no worker serves their model."""


class RouteChoice(Enum):
    """Who computes the prompt, and why."""

    SPLIT = "split"
    LOCAL_COVERED = "local_covered"
    LOCAL_NO_PREFILL = "local_no_prefill"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """
    Attributes:
        local_prefill_max_tokens: a decode worker computes a prompt itself when at most so many tokens of it are not
            in its prefix cache.
        allow_local_prefill: whether decode workers may compute prompts at all.
    """

    local_prefill_max_tokens: int = 16
    allow_local_prefill: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteQuery:
    """What there is to know of sequences before they are routed.

    Attributes:
        num_known_tokens: prompt and resumed output.
        num_choices: sequences that share the prompt and go to one decode worker.
        overlap_tokens: leading tokens that each worker has in its prefix cache; absent means none.
        avoid: workers that failed this request before; taken only where there is no other way.
    """

    request_id: RequestId
    model: str
    num_known_tokens: int
    num_choices: int = 1
    overlap_tokens: Mapping[WorkerId, int]
    avoid: Collection[Incarnation] = ()

    def num_uncached_tokens(self, worker: WorkerInfo) -> int:
        """Known tokens that the worker lacks; at least one, since the last is always computed again."""
        return max(1, self.num_known_tokens - self.overlap_tokens.get(worker.worker_id, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Where sequences go.

    Attributes:
        prefill: None: the decode worker computes the uncached part itself.
        num_uncached_tokens: tokens that the prefill worker has to compute; 0 without one.
    """

    prefill: WorkerInfo | None
    decode: WorkerInfo
    choice: RouteChoice
    num_uncached_tokens: int = 0


class Router:
    """The policy; holds its settings and nothing else."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings

    def choose(self, query: RouteQuery, fleet: Fleet, in_flight: InFlightLedger) -> Route:
        """The cheapest workers; the same ones for the same arguments.

        Raises:
            NoWorkerError: nobody serves the model; the hop names the role that is missing.
            CapacityExceededError: no worker's pool can ever hold the known tokens.
        """
        may_be_local = self._settings.allow_local_prefill
        members = fleet.of_model(query.model)
        if members.decode and not members.paired_decode and not may_be_local:
            raise _no_worker("prefill", query)
        decode = _cheapest_decode(query, members, members.decode if may_be_local else members.paired_decode, in_flight)
        if may_be_local and query.num_uncached_tokens(decode) <= self._settings.local_prefill_max_tokens:
            return Route(prefill=None, decode=decode, choice=RouteChoice.LOCAL_COVERED)
        workers = members.prefill.get(decode.fingerprint, ())
        able = _look_at(query, members, workers)
        if may_be_local and all(worker.incarnation in query.avoid for worker in able):
            return Route(prefill=None, decode=decode, choice=RouteChoice.LOCAL_NO_PREFILL)
        if not able:
            raise _too_small("prefill", query, workers)
        prefill = _cheapest(query, able, lambda worker: _prefill_cost(query, worker, in_flight))
        return Route(
            prefill=prefill,
            decode=decode,
            choice=RouteChoice.SPLIT,
            num_uncached_tokens=query.num_uncached_tokens(prefill),
        )

    def choose_decode(
        self, query: RouteQuery, fleet: Fleet, in_flight: InFlightLedger, *, prefill: WorkerInfo | None
    ) -> WorkerInfo:
        """Another decode worker for a prompt that `prefill` computes already, or that none does.

        Raises: as `choose`.
        """
        members = fleet.of_model(query.model)
        workers: Sequence[WorkerInfo] = members.decode
        if prefill is not None:
            workers = [worker for worker in workers if worker.fingerprint == prefill.fingerprint]
        return _cheapest_decode(query, members, workers, in_flight)


def _cheapest_decode(
    query: RouteQuery, members: ModelFleet, workers: Sequence[WorkerInfo], in_flight: InFlightLedger
) -> WorkerInfo:
    if not workers:
        raise _no_worker("decode", query)
    able = _look_at(query, members, workers)
    if not able:
        raise _too_small("decode", query, workers)
    return _cheapest(query, able, lambda worker: _decode_cost(query, worker, in_flight))


def _cheapest(query: RouteQuery, workers: Iterable[WorkerInfo], cost: Callable[[WorkerInfo], float]) -> WorkerInfo:
    return min(workers, key=lambda worker: (worker.incarnation in query.avoid, cost(worker), worker.worker_id))


def _look_at(query: RouteQuery, members: ModelFleet, workers: Sequence[WorkerInfo]) -> list[WorkerInfo]:
    """Those of `workers` (all of one role, and of one fingerprint where that matters) worth a look that can take it.

    All of them are searched when the few have nobody who is able and not to be avoided.
    """
    if len(workers) <= SAMPLE_SIZE:
        return [worker for worker in workers if _can_ever_hold(query, worker)]
    few = [*_best_prefixes(query, members, like=workers[0]), *_sample(query, workers)]
    able = [worker for worker in few if _can_ever_hold(query, worker)]
    if all(worker.incarnation in query.avoid for worker in able):
        able = [worker for worker in workers if _can_ever_hold(query, worker)]
    return able


def _best_prefixes(query: RouteQuery, members: ModelFleet, *, like: WorkerInfo) -> list[WorkerInfo]:
    overlaps = (
        (num_tokens, worker_id)
        for worker_id, num_tokens in query.overlap_tokens.items()
        if (worker := members.by_id.get(worker_id)) is not None
        and worker.role is like.role
        and worker.fingerprint == like.fingerprint
    )
    return [members.by_id[worker_id] for _, worker_id in heapq.nlargest(NUM_BEST_PREFIXES, overlaps)]


def _sample(query: RouteQuery, workers: Sequence[WorkerInfo]) -> list[WorkerInfo]:
    """Evenly spread, from a place that depends on the request alone."""
    start = crc32(query.request_id.encode())
    stride = len(workers) // SAMPLE_SIZE
    return [workers[(start + i * stride) % len(workers)] for i in range(SAMPLE_SIZE)]


def _can_ever_hold(query: RouteQuery, worker: WorkerInfo) -> bool:
    total_blocks = worker.load.total_blocks
    return total_blocks == 0 or worker.layout.blocks_for(query.num_known_tokens) <= total_blocks


def _prefill_cost(query: RouteQuery, worker: WorkerInfo, in_flight: InFlightLedger) -> float:
    num_uncached_tokens = query.num_uncached_tokens(worker)
    queued_tokens = max(worker.load.queued_tokens, in_flight.of(worker.incarnation).num_prompt_tokens)
    fits = worker.load.total_blocks == 0 or worker.layout.blocks_for(num_uncached_tokens) <= worker.load.free_blocks
    return queued_tokens + num_uncached_tokens + (0.0 if fits else DOES_NOT_FIT_COST)


def _decode_cost(query: RouteQuery, worker: WorkerInfo, in_flight: InFlightLedger) -> float:
    ours = in_flight.of(worker.incarnation)
    load = worker.load
    num_sequences = max(load.num_running + load.num_waiting, ours.num_sequences)
    num_uncached_tokens = query.num_uncached_tokens(worker)
    cost = num_uncached_tokens + SEQUENCE_COST * num_sequences
    if load.total_blocks:
        free_blocks = max(0, min(load.free_blocks, load.total_blocks - ours.num_blocks))
        cost += FULL_POOL_COST * (1.0 - free_blocks / load.total_blocks)
        if worker.layout.blocks_for(num_uncached_tokens) + query.num_choices > free_blocks:
            cost += DOES_NOT_FIT_COST
    return cost


def _no_worker(role: str, query: RouteQuery) -> NoWorkerError:
    return NoWorkerError(
        f"no {role} worker serves the model {query.model!r} now", hop=role, retry_after_s=RETRY_AFTER_S
    )


def _too_small(role: str, query: RouteQuery, workers: Iterable[WorkerInfo]) -> CapacityExceededError:
    most_tokens = max(worker.load.total_blocks * worker.layout.block_size for worker in workers)
    return CapacityExceededError(
        f"{query.num_known_tokens} tokens are more than the {most_tokens} that the largest KV cache of a {role} worker"
        " holds",
        param="prompt",
        hop=role,
    )
