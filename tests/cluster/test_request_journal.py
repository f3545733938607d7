"""Laws of the states of a request, on a real server."""

import asyncio
import itertools
import json
from dataclasses import replace

import pytest

from tests.cluster.samples import ManualClock, connect, until
from tests.fakes.redis_server import RedisServer
from weir.cluster import keys
from weir.cluster.request_journal import (
    HopTimings,
    RequestFailure,
    RequestJournal,
    RequestRecord,
    RequestState,
    is_accepted,
)
from weir.core.deadline import Deadline
from weir.core.errors import WorkerLostError
from weir.core.request import FinishReason, RequestId
from weir.core.worker import WorkerId

Q, P, S, D, DONE, FAILED, CANCELLED = RequestState
TERMINAL = (DONE, FAILED, CANCELLED)
MOVES = [(epoch, state, owner) for epoch in (0, 1, 2) for state in RequestState for owner in ("g1", "g2")]


def record(
    epoch: int = 0, state: RequestState = Q, owner: str = "g1", request_id: str = "r1", **facts: object
) -> RequestRecord:
    return RequestRecord(
        request_id=RequestId(request_id),
        owner=owner,
        state=state,
        epoch=epoch,
        **facts,  # type: ignore[arg-type]
    )


def model_accepts(stored: tuple[int, RequestState, str] | None, new: tuple[int, RequestState, str]) -> bool:
    """The rule as handoff.md has it, written a second time: as the list of what is allowed."""
    order = {Q: 0, P: 1, S: 2, D: 3, DONE: 4, FAILED: 4, CANCELLED: 4}
    if stored is None:
        return True
    (old_epoch, old_state, old_owner), (new_epoch, new_state, new_owner) = stored, new
    if old_state in TERMINAL or old_owner != new_owner or new_epoch < old_epoch:
        return False
    return new_epoch > old_epoch or order[new_state] > order[old_state]


def test_any_state_with_any_input_follows_the_model() -> None:
    for stored, new in itertools.product(MOVES, MOVES):
        assert is_accepted(record(*stored), record(*new)) == model_accepts(stored, new), (stored, new)


async def test_redis_decides_any_state_with_any_input_as_the_model_does(redis_server: RedisServer) -> None:
    """Each pair has its own key: first the stored record, then the input."""
    moves = [move for move in MOVES if move[0] < 2]
    pairs = list(itertools.product([None, *moves], moves))
    async with connect(redis_server.url, call_timeout_s=5.0) as connection, RequestJournal(connection) as journal:
        for index, (stored, _) in enumerate(pairs):
            if stored is not None:
                journal.record(record(*stored, request_id=f"r{index}", label="stored"))
        await journal.wait_until_sent()
        for index, (_, new) in enumerate(pairs):
            journal.record(record(*new, request_id=f"r{index}", label="new"))
        await journal.wait_until_sent()
        for index, (stored, new) in enumerate(pairs):
            found = await journal.get(RequestId(f"r{index}"))
            assert found is not None
            assert (found.label == "new") == model_accepts(stored, new), (stored, new)
            expected = new if model_accepts(stored, new) else stored
            assert (found.epoch, found.state, found.owner) == expected


async def test_whole_record_comes_back(redis_server: RedisServer) -> None:
    clock = ManualClock()
    whole = record(
        2,
        FAILED,
        model="tiny",
        label="mine",
        created_s=1_700_000_000,
        prefill_worker=WorkerId("p1"),
        decode_worker=WorkerId("d1"),
        deadline=Deadline.after(30, clock),
        num_choices=2,
        num_prompt_tokens=10,
        num_cached_tokens=4,
        num_output_tokens=3,
        finish_reasons=(FinishReason.STOP, FinishReason.LENGTH),
        timings=HopTimings(queue_s=0.5, transfer_s=0.25),
        failure=RequestFailure.from_error(WorkerLostError("gone", hop="decode")),
    )
    async with connect(redis_server.url) as connection, RequestJournal(connection, clock=clock) as journal:
        journal.record(whole)
        await journal.wait_until_sent()
        found = await journal.get(RequestId("r1"))
        assert found is not None
        assert found.failure == RequestFailure(hop="decode", code="worker_lost", message="gone")
        assert found.deadline.remaining_s(clock) == pytest.approx(30, abs=1)
        assert replace(found, deadline=whole.deadline) == whole
        assert await journal.get(RequestId("unknown")) is None


def test_record_of_a_neighbouring_version_is_read() -> None:
    written = record(epoch=1, failure=RequestFailure(hop="decode", code="worker_lost", message="gone"))
    fields = json.loads(written.to_json())
    del fields["label"], fields["timings"]["total_s"]
    later = fields | {"zone": "a", "failure": fields["failure"] | {"attempts": 3}}
    assert RequestRecord.from_json(json.dumps(later), deadline=Deadline.never()) == written


async def test_record_without_deadline_comes_back_without(redis_server: RedisServer) -> None:
    async with connect(redis_server.url) as connection, RequestJournal(connection) as journal:
        journal.record(record())
        await journal.wait_until_sent()
        found = await journal.get(RequestId("r1"))
        assert found is not None
        assert found.deadline == Deadline.never()


async def test_two_gateways_race_and_each_request_keeps_one_owner(redis_server: RedisServer) -> None:
    """Both write every state of the same requests at the same time, each over its own link."""
    async with connect(redis_server.url, call_timeout_s=5) as one, connect(redis_server.url, call_timeout_s=5) as two:
        async with RequestJournal(one) as journal_one, RequestJournal(two) as journal_two:
            owners: dict[str, set[str]] = {f"r{index}": set() for index in range(50)}
            for state in (Q, P, S, D, DONE):
                for request_id in owners:
                    journal_one.record(record(0, state, "g1", request_id))
                    journal_two.record(record(0, state, "g2", request_id))
                async with asyncio.TaskGroup() as group:
                    group.create_task(journal_one.wait_until_sent())
                    group.create_task(journal_two.wait_until_sent())
                for request_id, seen in owners.items():
                    found = await journal_one.get(RequestId(request_id))
                    assert found is not None
                    assert found.state is state
                    seen.add(found.owner)
            assert all(len(seen) == 1 for seen in owners.values())
            stats = (journal_one.stats, journal_two.stats)
            assert sum(each.num_written for each in stats) == 250
            assert sum(each.num_stale for each in stats) == 250


async def test_recording_never_waits_and_redis_catches_up(redis_server: RedisServer) -> None:
    async with connect(redis_server.url) as connection, RequestJournal(connection) as journal:
        redis_server.kill()
        await until(lambda: not connection.is_up)
        for state in (Q, P, S, D, DONE):
            journal.record(record(0, state))
        journal.record(record(0, P))
        redis_server.start()
        async with asyncio.timeout(5):
            await journal.wait_until_sent()
        found = await journal.get(RequestId("r1"))
        assert found is not None
        assert found.state is DONE
        assert journal.stats.num_written == 1


async def test_ended_request_is_kept_for_a_while_and_a_running_one_to_its_deadline(redis_server: RedisServer) -> None:
    clock = ManualClock()
    async with connect(redis_server.url) as connection:
        async with RequestJournal(connection, clock=clock, keep_s=10, max_lifetime_s=1_000) as journal:
            journal.record(record(0, DONE, request_id="ended", deadline=Deadline.after(500, clock)))
            journal.record(record(0, D, request_id="running", deadline=Deadline.after(500, clock)))
            journal.record(record(0, D, request_id="endless"))
            journal.record(record(0, D, request_id="long", deadline=Deadline.after(5_000, clock)))
            await journal.wait_until_sent()
            for request_id, ttl_s in (("ended", 10), ("running", 510), ("endless", 1_000), ("long", 1_000)):
                ttl_ms = redis_server.call("PTTL", keys.request(RequestId(request_id)))
                assert ttl_s - 5 < ttl_ms / 1_000 <= ttl_s
