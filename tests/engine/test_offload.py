"""Sequences whose KV leaves the pool and comes back: the same tokens, nobody waits for a copy, nothing stays behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.fakes.engine_harness import EngineHarness
from tests.fakes.model_runner import VOCAB_SIZE, expected_output, make_request
from weir.core.deadline import Deadline
from weir.core.request import SamplingParams, SequenceRequest
from weir.engine.llm import LLM

PROMPTS = [[(start * 11 + index * 7) % VOCAB_SIZE for index in range(24)] for start in range(9)]


def make_harness(**settings: int) -> EngineHarness:
    """Twelve blocks of four tokens."""
    return EngineHarness(**({"num_blocks": 12, "num_host_slots": 24} | settings))


def turn(name: str, conversation: int, extra: int = 0, **fields: object) -> SequenceRequest:
    prompt = [*PROMPTS[conversation], *range(1, extra + 1)]
    return make_request(name, prompt, **({"max_tokens": 3} | fields))  # type: ignore[arg-type]


def run_turns(harness: EngineHarness, *requests: SequenceRequest) -> None:
    for request in requests:
        harness.submit(request)
        harness.run()
    harness.check_outputs(requests)


def with_conversations_on_disk() -> EngineHarness:
    """The first ones: host memory has room for four."""
    harness = make_harness(num_host_slots=28, num_disk_slots=80)
    for conversation in range(9):
        run_turns(harness, turn(f"first {conversation}", conversation))
        harness.disk.do(99)
    return harness


def test_prefix_comes_back_from_host_memory() -> None:
    harness = make_harness()
    run_turns(harness, turn("a", 0), turn("b", 1), turn("c", 2), turn("again", 0, 5))
    assert harness.cached == {"a": 0, "b": 0, "c": 0, "again": 24}
    assert harness.engine.stats.host.num_hit_tokens > 0
    assert harness.engine.stats.prefix_cache_hits == 24


def test_prefix_comes_back_from_disk() -> None:
    harness = with_conversations_on_disk()
    run_turns(harness, turn("again", 0, 5))
    assert harness.cached["again"] == 24
    assert harness.engine.stats.disk.num_hit_tokens > 0


def test_without_host_memory_it_is_computed_again() -> None:
    harness = make_harness(num_host_slots=0)
    run_turns(harness, turn("a", 0), turn("b", 1), turn("c", 2), turn("again", 0, 5))
    assert harness.cached["again"] == 0


def test_nobody_waits_for_somebody_elses_load() -> None:
    harness = make_harness()
    run_turns(harness, turn("a", 0), turn("b", 1), turn("c", 2))
    back = turn("back", 0, 5)
    other = make_request("other", [40, 41], max_tokens=6)
    harness.submit(back, other)
    harness.step(4)
    assert (len(harness.tokens["other"]), "back" in harness.tokens) == (4, False)
    assert (harness.engine.stats.num_loading, harness.engine.stats.num_running) == (1, 1)
    harness.loads.do(99)
    harness.step()
    assert len(harness.tokens["back"]) == 1, "the step after the copy computes the rest of the prompt"
    harness.run()
    harness.check_outputs([back, other])


def test_who_shares_a_prefix_that_is_loaded_waits_for_it() -> None:
    harness = make_harness()
    run_turns(harness, turn("a", 0), turn("b", 1), turn("c", 2))
    num_hit_tokens = harness.engine.stats.host.num_hit_tokens
    pair = turn("one", 0, 2), turn("two", 0, 3)
    harness.submit(*pair)
    harness.step(2)
    assert (harness.engine.stats.num_loading, harness.engine.stats.num_deferred) == (1, 1)
    harness.run()
    harness.check_outputs(pair)
    assert harness.engine.stats.host.num_hit_tokens - num_hit_tokens <= 24, "it was loaded once"


def test_preempted_sequence_comes_back_without_computing_what_was_saved() -> None:
    harness = make_harness(num_blocks=15, num_host_slots=40)
    requests = [turn(name, index, max_tokens=16) for index, name in enumerate("ab")]
    harness.submit(*requests)
    harness.run()
    harness.check_outputs(requests)
    stats = harness.engine.stats
    assert stats.num_preemptions > 0
    assert stats.host.num_hit_tokens > 0
    num_computed = sum(num_tokens for _, num_tokens in harness.runner.steps)
    num_needed = sum(24 + 16 - 1 for _ in requests)
    assert num_computed - num_needed < 4 * (1 + stats.num_preemptions), "only partial blocks were computed twice"


def test_shorter_runs_are_computed() -> None:
    harness = make_harness()
    assert harness.cold is not None
    harness.cold._min_loaded_tokens = 25
    run_turns(harness, turn("a", 0), turn("b", 1), turn("c", 2), turn("again", 0, 0))
    assert harness.cached["again"] == 0


@pytest.mark.parametrize("end", ["abort", "deadline"])
def test_load_of_a_sequence_that_ends_harms_nobody(end: str) -> None:
    harness = make_harness()
    run_turns(harness, turn("a", 0), turn("b", 1), turn("c", 2))
    harness.submit(turn("gone", 0, 5, deadline=Deadline(at_s=harness.now_s + 2)))
    harness.step()
    assert harness.engine.stats.num_loading == 1
    if end == "abort":
        harness.engine.abort("gone")
    harness.step(2)
    assert harness.engine.stats.num_loading == 0
    assert harness.num_free_blocks == 12
    run_turns(harness, turn("next", 3, 9, max_tokens=12), turn("back", 0, 5))


def test_slow_disk_is_not_waited_for() -> None:
    """No longer than computing would have taken."""
    harness = with_conversations_on_disk()
    assert harness.cold is not None
    harness.cold.token_s = lambda: 0.25
    back = turn("back", 0, 5)
    harness.submit(back)
    harness.step(6)
    assert harness.engine.stats.num_loading == 1
    harness.step(3)
    assert harness.engine.stats.num_loading == 0, "six blocks of four tokens at a quarter of a second"
    harness.run()
    harness.check_outputs([back])
    harness.disk.do(99)
    harness.step()
    assert harness.num_free_blocks == 12


def test_damaged_blocks_are_computed_again() -> None:
    harness = with_conversations_on_disk()
    assert harness.cold is not None
    assert harness.cold._disk is not None
    for entry in harness.cold._disk._entries.values():
        assert entry.checksum is not None
        entry.checksum ^= 1
    run_turns(harness, turn("again", 0, 5))
    assert harness.engine.stats.disk.num_hit_tokens == 0


def test_cold_content_counts_for_the_reader_of_events() -> None:
    harness = make_harness(num_host_slots=9)
    known: set[bytes] = set()
    for conversation in (0, 1, 2, 3, 0, 2):
        run_turns(harness, turn(f"{conversation}-{harness.now_s}", conversation))
        events = harness.engine.take_kv_events()
        assert not events.cleared or not known
        known = known.difference(events.removed) | set(events.stored)
        assert known == set(harness.engine.kv_snapshot())
    assert len(known) > 12, "more than the pool holds"
    assert harness.engine.reset_prefix_cache()
    assert harness.engine.kv_snapshot() == ()
    run_turns(harness, turn("last", 0))
    assert harness.cached["last"] == 0


class OffloadMachine(RuleBasedStateMachine):
    """Conversations that come back to a pool which holds two of them; copies and the disk take their time."""

    def __init__(self) -> None:
        super().__init__()
        self.num_requests = 0
        self.open: dict[str, SequenceRequest] = {}
        self.prefills: dict[str, SequenceRequest] = {}
        self.holds: set[str] = set()

    @initialize(
        num_host_slots=st.sampled_from([3, 12, 28]),
        num_disk_slots=st.sampled_from([0, 4, 40]),
        budget=st.sampled_from([8, 40]),
    )
    def start(self, num_host_slots: int, num_disk_slots: int, budget: int) -> None:
        self.harness = make_harness(
            num_blocks=14,
            num_host_slots=num_host_slots,
            num_disk_slots=num_disk_slots,
            max_num_batched_tokens=budget,
        )

    def make(self, conversation: int, extra: int, max_tokens: int) -> SequenceRequest:
        self.num_requests += 1
        return turn(f"s{self.num_requests}", conversation, extra, max_tokens=max_tokens)

    @rule(conversation=st.integers(0, 3), extra=st.integers(0, 9), max_tokens=st.integers(1, 12))
    def submit(self, conversation: int, extra: int, max_tokens: int) -> None:
        request = self.make(conversation, extra, max_tokens)
        self.open[request.sequence_id] = request
        self.harness.submit(request)

    @rule(conversation=st.integers(0, 3), extra=st.integers(0, 9))
    def prefill(self, conversation: int, extra: int) -> None:
        request = self.make(conversation, extra, 2)
        self.prefills[request.sequence_id] = request
        self.harness.prefill(request, 0)
        self.holds.add(f"{request.sequence_id}#0")

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), is_aborted=st.booleans())
    def release_hold(self, data: st.DataObject, is_aborted: bool) -> None:
        hold = data.draw(st.sampled_from(sorted(self.holds)))
        self.holds.discard(hold)
        if is_aborted:
            self.harness.engine.abort(hold.partition("#")[0])
        self.harness.engine.release_hold(hold)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.open)))
        self.harness.engine.abort(name)
        del self.open[name]

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        self.harness.step(count)

    @rule(num_saves=st.integers(0, 2), num_loads=st.integers(0, 2), num_jobs=st.integers(0, 9))
    def move(self, num_saves: int, num_loads: int, num_jobs: int) -> None:
        self.harness.disk.do(num_jobs)
        self.harness.saves.do(num_saves)
        self.harness.loads.do(num_loads)

    @rule()
    def forget(self) -> None:
        self.harness.engine.reset_prefix_cache()

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        harness = self.harness
        for hold in self.holds:
            harness.engine.release_hold(hold)
        harness.run()
        harness.check_outputs(list(self.open.values()))
        assert harness.errors == {}
        for name, heard in harness.progress.items():
            for first in heard[-1].first_tokens or ():
                assert first.token_id == expected_output(self.prefills[name])[0][0]
        assert harness.num_free_blocks == 14, "a block leaked"
        harness.disk.do(99)
        harness.loads.do(99)
        harness.step()
        assert harness.cold is not None
        assert not harness.cold._departing
        assert not harness.cold._arriving


TestOffloadMachine = OffloadMachine.TestCase


GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
LONG_PROMPTS = [[(11 * start + 7 * index) % 90 + 3 for index in range(70 + 9 * start)] for start in range(4)]


@pytest.mark.parametrize("has_disk", [False, True], ids=["host", "disk"])
def test_tiny_model_says_the_same_with_and_without(tiny_model_dir: Path, tmp_path: Path, has_disk: bool) -> None:
    """Chunked and preempted, with real copies and a real file."""
    plain = LLM(tiny_model_dir, device="cpu", max_model_len=128, num_blocks=64)
    expected = [plain.generate([prompt], GREEDY)[0].token_ids for prompt in LONG_PROMPTS]
    block_bytes = plain._engine.runner.layout.block_bytes
    tiers = {"disk_kv_cache_bytes": 64 * block_bytes, "disk_kv_cache_dir": tmp_path} if has_disk else {}
    small = LLM(
        tiny_model_dir,
        device="cpu",
        max_model_len=128,
        num_blocks=12,
        max_num_batched_tokens=40,
        max_num_seqs=4,
        host_kv_cache_bytes=(10 if has_disk else 40) * block_bytes,
        **tiers,
    )
    for _ in range(3):
        assert [generation.token_ids for generation in small.generate(LONG_PROMPTS, GREEDY)] == expected
    small.check_integrity()
    assert small.stats.num_preemptions > 0
    assert small.stats.host.num_hit_tokens > 0
    assert (small.stats.disk.num_saved_blocks > 0) == has_disk
