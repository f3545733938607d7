"""The laws of routing: a pure choice of able workers, the cheapest of them, at a flat cost."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet import Fleet
from gateway.in_flight import InFlightLedger
from gateway.router import Route, RouteChoice, RouteQuery, Router, RouterSettings
from tests.fakes.worker_clients import MODEL, worker_info
from weir.core.errors import CapacityExceededError, NoWorkerError
from weir.core.request import RequestId
from weir.core.worker import Incarnation, Role, WorkerId, WorkerInfo, WorkerLoad, WorkerState

SPLIT = RouterSettings(local_prefill_max_tokens=0)


def query(num_known_tokens: int = 40, **fields: object) -> RouteQuery:
    base = RouteQuery(request_id=RequestId("r"), model=MODEL, num_known_tokens=num_known_tokens, overlap_tokens={})
    return replace(base, **fields)  # type: ignore[arg-type]


def choose(workers: list[WorkerInfo], asked: RouteQuery | None = None, settings: RouterSettings = SPLIT) -> Route:
    return Router(settings).choose(asked or query(), Fleet(workers), InFlightLedger())


def prefill(name: str = "p0", **fields: object) -> WorkerInfo:
    return worker_info(name, Role.PREFILL, **fields)  # type: ignore[arg-type]


def decode(name: str = "d0", **fields: object) -> WorkerInfo:
    return worker_info(name, Role.DECODE, **fields)  # type: ignore[arg-type]


def busy(num_running: int = 0, queued_tokens: int = 0, free_blocks: int = 100) -> WorkerLoad:
    return WorkerLoad(num_running=num_running, queued_tokens=queued_tokens, free_blocks=free_blocks, total_blocks=100)


def test_a_prompt_goes_to_both_roles() -> None:
    route = choose([prefill(), decode()])
    assert (route.prefill, route.decode, route.choice) == (prefill(), decode(), RouteChoice.SPLIT)
    assert route.num_uncached_tokens == 40


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "another"},
        {"state": WorkerState.DRAINING},
        {"protocol_min": 2, "protocol_max": 3},
        {"protocol_min": 0, "protocol_max": 0},
    ],
)
def test_a_worker_that_may_not_take_it_is_never_chosen(fields: dict[str, object]) -> None:
    unfit = [prefill("p0", **fields), decode("d0", **fields)]
    with pytest.raises(NoWorkerError):
        choose(unfit)
    route = choose([*unfit, prefill("p1"), decode("d1")])
    assert (route.prefill, route.decode) == (prefill("p1"), decode("d1"))


def test_a_neighbouring_version_is_taken() -> None:
    assert choose([decode(protocol_min=1, protocol_max=2)]).decode.protocol_max == 2


def test_prefill_and_decode_always_mean_the_same_by_their_kv() -> None:
    route = choose([prefill("p0", weights_hash="old"), prefill("p1", weights_hash="new"), decode(weights_hash="new")])
    assert route.prefill is not None
    assert route.prefill.worker_id == "p1"
    alone = choose([prefill(weights_hash="old"), decode(weights_hash="new")])
    assert alone.choice is RouteChoice.LOCAL_NO_PREFILL


def test_where_decode_may_not_compute_prompts_it_is_chosen_among_those_with_a_partner() -> None:
    settings = RouterSettings(allow_local_prefill=False)
    workers = [prefill(weights_hash="new"), decode("d0", weights_hash="old"), decode("d1", weights_hash="new")]
    assert choose(workers, settings=settings).decode.worker_id == "d1"
    with pytest.raises(NoWorkerError) as caught:
        choose(workers[1:], settings=settings)
    assert caught.value.hop == "prefill"


def test_without_decode_nothing_goes() -> None:
    with pytest.raises(NoWorkerError) as caught:
        choose([prefill()])
    assert caught.value.hop == "decode"
    assert caught.value.retry_after_s


def test_a_prompt_that_decode_has_goes_to_it_alone() -> None:
    settings = RouterSettings(local_prefill_max_tokens=8)
    workers = [prefill(), decode("d0"), decode("d1")]
    route = choose(workers, query(overlap_tokens={WorkerId("d1"): 32}), settings)
    assert (route.prefill, route.decode.worker_id, route.choice) == (None, "d1", RouteChoice.LOCAL_COVERED)
    route = choose(workers, query(overlap_tokens={WorkerId("d1"): 28}), settings)
    assert route.choice is RouteChoice.SPLIT


def test_the_longest_prefix_wins_until_its_queue_costs_more() -> None:
    workers = [prefill("p0"), prefill("p1", load=busy(queued_tokens=20)), decode()]
    short = choose(workers, query(overlap_tokens={WorkerId("p1"): 16}))
    assert short.prefill is not None
    assert short.prefill.worker_id == "p0"
    long = choose(workers, query(overlap_tokens={WorkerId("p1"): 24}))
    assert long.prefill is not None
    assert long.prefill.worker_id == "p1"
    assert long.num_uncached_tokens == 16


def test_a_decode_worker_with_room_is_preferred_to_a_full_one() -> None:
    full, free = decode("d0", load=busy(free_blocks=5)), decode("d1", load=busy(num_running=20, free_blocks=50))
    assert choose([full, free]).decode == free
    assert choose([full]).decode == full


def test_what_is_in_flight_counts_before_any_heartbeat_tells() -> None:
    workers = [prefill("p0"), prefill("p1"), decode("d0"), decode("d1")]
    fleet, in_flight = Fleet(workers), InFlightLedger()
    chosen: list[tuple[str, str]] = []
    for _ in range(4):
        route = Router(SPLIT).choose(query(), fleet, in_flight)
        assert route.prefill is not None
        in_flight.add(route.prefill.incarnation, num_prompt_tokens=route.num_uncached_tokens)
        in_flight.add(route.decode.incarnation, num_sequences=1, num_blocks=10)
        chosen.append((route.prefill.worker_id, route.decode.worker_id))
    assert chosen == [("p0", "d0"), ("p1", "d1"), ("p0", "d0"), ("p1", "d1")]


def test_workers_to_avoid_are_taken_only_where_there_is_no_other_way() -> None:
    workers = [prefill("p0"), prefill("p1"), decode("d0"), decode("d1")]
    route = choose(workers, query(avoid={Incarnation("p0-1"), Incarnation("d0-1")}))
    assert route.prefill is not None
    assert (route.prefill.worker_id, route.decode.worker_id) == ("p1", "d1")
    everyone = query(avoid={worker.incarnation for worker in workers})
    assert choose(workers, everyone).choice is RouteChoice.LOCAL_NO_PREFILL
    never_local = replace(SPLIT, allow_local_prefill=False)
    assert choose(workers, everyone, never_local).choice is RouteChoice.SPLIT


def test_what_fits_no_pool_is_refused_with_its_figures() -> None:
    with pytest.raises(CapacityExceededError) as caught:
        choose([prefill(), decode()], query(num_known_tokens=401))
    assert "401" in str(caught.value)
    assert "400" in str(caught.value)
    assert choose([prefill(), decode()], query(num_known_tokens=400)).choice is RouteChoice.SPLIT


def test_a_small_prefill_pool_leaves_long_prompts_to_decode() -> None:
    small = prefill(load=WorkerLoad(free_blocks=5, total_blocks=5))
    assert choose([small, decode()]).choice is RouteChoice.LOCAL_NO_PREFILL


def test_another_decode_worker_must_suit_the_prefill_that_was_done() -> None:
    workers = [decode("d0"), decode("d1", weights_hash="other"), decode("d2", load=busy(num_running=9))]
    router, fleet = Router(SPLIT), Fleet(workers)
    asked = query(avoid={Incarnation("d0-1")})
    assert router.choose_decode(asked, fleet, InFlightLedger(), prefill=prefill()).worker_id == "d2"
    assert router.choose_decode(asked, fleet, InFlightLedger(), prefill=None).worker_id == "d1"


LOADS = st.builds(
    WorkerLoad,
    num_running=st.integers(0, 50),
    num_waiting=st.integers(0, 5),
    queued_tokens=st.integers(0, 5000),
    free_blocks=st.integers(0, 100),
    total_blocks=st.just(100),
)
WORKERS = st.lists(
    st.tuples(
        st.sampled_from(Role), LOADS, st.sampled_from(["w", "v"]), st.sampled_from(WorkerState), st.integers(0, 40)
    ),
    max_size=40,
)


@given(drawn=WORKERS, num_tokens=st.integers(1, 300), avoid=st.integers(0, 2**40 - 1))
def test_every_choice_is_able_and_the_same_for_the_same_facts(
    drawn: list[tuple[Role, WorkerLoad, str, WorkerState, int]], num_tokens: int, avoid: int
) -> None:
    workers = [
        worker_info(f"x{i:02}", role, load=load, weights_hash=weights, state=state)
        for i, (role, load, weights, state, _) in enumerate(drawn)
    ]
    overlaps = {worker.worker_id: 4 * blocks for worker, (*_, blocks) in zip(workers, drawn, strict=True) if blocks}
    avoided = {worker.incarnation for i, worker in enumerate(workers) if avoid >> i & 1}
    asked = query(num_known_tokens=num_tokens, overlap_tokens=overlaps, avoid=avoided)
    able = [worker for worker in workers if worker.role is Role.DECODE and worker.state is WorkerState.READY]
    if not able:
        with pytest.raises(NoWorkerError):
            choose(workers, asked)
        return
    route = choose(workers, asked)
    assert route == choose(list(reversed(workers)), asked)
    assert route.decode in able
    if any(worker.incarnation not in avoided for worker in able):
        assert route.decode.incarnation not in avoided
    if route.prefill is not None:
        assert route.prefill.role is Role.PREFILL
        assert route.prefill.state is WorkerState.READY
        assert route.prefill.fingerprint == route.decode.fingerprint
        assert route.prefill.incarnation not in avoided
    else:
        assert not [
            worker
            for worker in workers
            if worker.role is Role.PREFILL
            and worker.state is WorkerState.READY
            and worker.fingerprint == route.decode.fingerprint
            and worker.incarnation not in avoided
        ]


def test_among_a_thousand_the_one_with_the_prefix_is_found() -> None:
    workers = [decode(f"d{i:04}", load=busy(num_running=20)) for i in range(1000)]
    asked = query(num_known_tokens=390, overlap_tokens={WorkerId("d0777"): 388})
    assert choose(workers, asked).decode.worker_id == "d0777"


def test_among_a_thousand_different_requests_find_different_workers() -> None:
    workers = [decode(f"d{i:04}") for i in range(1000)]
    chosen = {choose(workers, query(request_id=RequestId(f"r{i}"))).decode.worker_id for i in range(50)}
    assert len(chosen) > 25


def test_the_cost_of_a_choice_does_not_grow_with_the_fleet() -> None:
    def best_of(num_workers: int) -> float:
        fleet = Fleet(
            [decode(f"d{i:04}") for i in range(num_workers)] + [prefill(f"p{i:04}") for i in range(num_workers)]
        )
        router, in_flight, asked = Router(SPLIT), InFlightLedger(), query()
        times = []
        for _ in range(30):
            started = time.perf_counter()
            for _ in range(10):
                router.choose(asked, fleet, in_flight)
            times.append(time.perf_counter() - started)
        return min(times)

    assert best_of(1000) < 4 * best_of(20)
