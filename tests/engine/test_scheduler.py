"""Scheduler: who computes how much, who waits, who gives way."""

from __future__ import annotations

from tests.fakes.model_runner import make_request
from weir.engine.kv_cache_manager import KvCacheManager
from weir.engine.scheduler import Schedule, Scheduler
from weir.engine.sequence import PrefillChoice, Sequence, SequenceState


class Bench:
    """A scheduler whose steps always succeed; token n of every output is n."""

    def __init__(self, *, num_blocks: int = 64, block_size: int = 4, max_num_seqs: int = 8, budget: int = 16) -> None:
        self.cache = KvCacheManager(num_blocks, block_size)
        self.scheduler = Scheduler(self.cache, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
        self.sequences: dict[str, Sequence] = {}

    def make(self, name: str, prompt: list[int] | int, *, priority: int = 0, is_prefill_only: bool = False) -> Sequence:
        """An int is a prompt of that length that shares nothing with others."""
        arrival = len(self.sequences)
        tokens = [arrival + 1] * prompt if isinstance(prompt, int) else prompt
        choices = (PrefillChoice(choice_index=0, hold_id=f"hold-{name}"),) if is_prefill_only else ()
        request = make_request(name, tokens, priority=priority, max_tokens=1000)
        sequence = Sequence(request, arrival=arrival, arrived_s=0.0, choices=choices)
        self.sequences[name] = sequence
        return sequence

    def add(self, name: str, prompt: list[int] | int, **fields: int) -> Sequence:
        sequence = self.make(name, prompt, **fields)  # type: ignore[arg-type]
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> dict[str, int]:
        """Tokens of each sequence, in the order of the schedule."""
        schedule = self.scheduler.schedule()
        self.finish(schedule)
        return {chunk.sequence.sequence_id: chunk.num_tokens for chunk in schedule.chunks}

    def finish(self, schedule: Schedule) -> None:
        for chunk in schedule.chunks:
            self.scheduler.launch(chunk)
            self.scheduler.advance(chunk)
            if chunk.sequence.num_uncomputed_tokens == 0:
                chunk.sequence.append(chunk.sequence.num_output_tokens)
        self.scheduler.check_integrity()


def test_a_sequence_catches_up_with_the_tokens_it_has() -> None:
    bench = Bench()
    bench.add("a", 37)
    assert [bench.step() for _ in range(4)] == [{"a": 16}, {"a": 16}, {"a": 5}, {"a": 1}]


def test_decodes_first_then_running_prompts_then_waiting() -> None:
    bench = Bench()
    bench.add("decoding", 3)
    bench.step()
    bench.add("running", 20)
    assert bench.step() == {"decoding": 1, "running": 15}
    bench.add("waiting", 20)
    assert bench.step() == {"decoding": 1, "running": 5, "waiting": 10}
    assert bench.step() == {"decoding": 1, "running": 1, "waiting": 10}


def test_more_urgent_prompts_are_computed_first() -> None:
    bench = Bench()
    bench.add("first", 40)
    bench.step()
    bench.add("urgent", 20, priority=-1)
    bench.add("late", 20, priority=1)
    bench.add("second", 20)
    assert bench.step() == {"first": 16}
    assert bench.step() == {"first": 8, "urgent": 8}
    assert bench.step() == {"first": 1, "urgent": 12, "second": 3}


def test_seats_are_bounded() -> None:
    bench = Bench(max_num_seqs=2)
    for name in ("a", "b", "c"):
        bench.add(name, 3)
    assert bench.step() == {"a": 3, "b": 3}
    bench.scheduler.remove(bench.sequences["a"])
    assert bench.step() == {"b": 1, "c": 3}


def test_head_of_the_line_is_not_overtaken_for_want_of_blocks() -> None:
    bench = Bench(num_blocks=8)
    bench.add("a", 20)
    bench.step()
    bench.add("big", 20)
    bench.add("small", 2)
    assert bench.step() == {"a": 4}
    bench.scheduler.remove(bench.sequences["a"])
    assert bench.step() == {"big": 16}


def test_least_urgent_newest_gives_way() -> None:
    bench = Bench(num_blocks=7, budget=64)
    for name, priority in (("a", 0), ("low", 5), ("b", 0)):
        bench.add(name, 8, priority=priority)
    bench.step()
    assert bench.step() == {"a": 1, "b": 1}, "two blocks were wanted by three"
    assert bench.sequences["low"].state is SequenceState.WAITING
    assert bench.sequences["low"].block_ids == []
    assert bench.sequences["low"].num_tokens == 9, "its output is kept"
    assert bench.scheduler.num_preemptions == 1


def test_newest_gives_way_among_equals_even_to_itself() -> None:
    bench = Bench(num_blocks=5, budget=64)
    bench.add("a", 8)
    bench.add("b", 8)
    bench.step()
    assert bench.step() == {"a": 1}
    assert bench.sequences["b"].state is SequenceState.WAITING


def test_preempted_sequence_comes_back_before_those_who_came_later() -> None:
    bench = Bench(num_blocks=5, budget=64)
    bench.add("a", 8)
    bench.add("b", 8)
    bench.step()
    bench.add("c", 4)
    bench.step()
    bench.scheduler.remove(bench.sequences["a"])
    assert bench.step() == {"b": 1, "c": 4}, "its two full blocks were still cached"


def test_prefix_that_is_being_computed_is_not_computed_twice() -> None:
    bench = Bench(budget=64)
    shared = list(range(20))
    bench.add("a", [*shared, 30])
    bench.add("b", [*shared, 31, 32])
    bench.add("other", 5)
    assert bench.step() == {"a": 21, "other": 5}
    assert bench.scheduler.num_deferred == 1
    assert bench.step() == {"a": 1, "other": 1, "b": 2}
    assert bench.scheduler.num_deferred == 0


def test_deferred_sequence_keeps_its_place() -> None:
    bench = Bench(budget=21, max_num_seqs=4)
    shared = list(range(16))
    bench.add("a", [*shared, 30])
    bench.add("b", [*shared, 31])
    bench.add("c", [*shared, 32])
    assert bench.step() == {"a": 17}
    assert bench.step() == {"a": 1, "b": 1, "c": 1}


def test_unfinished_owner_that_is_aborted_leaves_nobody_waiting() -> None:
    bench = Bench(budget=64)
    shared = list(range(20))
    owner = bench.add("a", [*shared, 30])
    bench.add("b", [*shared, 31])
    schedule = bench.scheduler.schedule()
    assert [chunk.sequence for chunk in schedule.chunks] == [owner]
    bench.scheduler.remove(owner)
    assert bench.step() == {"b": 21}


def test_prefill_for_a_handoff_never_gives_way() -> None:
    bench = Bench(num_blocks=8, budget=12)
    bench.add("a", 8)
    bench.add("p", 18, is_prefill_only=True)
    bench.step()
    for _ in range(3):
        bench.step()
    assert bench.sequences["p"].state is SequenceState.RUNNING
    assert len(bench.sequences["p"].block_ids) == 5


def test_claims_and_imports_have_seats_and_no_turn() -> None:
    bench = Bench(max_num_seqs=2)
    claimed = bench.make("c", 9)
    assert bench.scheduler.claim(claimed)
    bench.add("a", 3)
    bench.add("b", 3)
    assert bench.step() == {"a": 3}
    assert not bench.scheduler.claim(bench.make("d", 3))
    bench.scheduler.start_import(claimed)
    assert bench.step() == {"a": 1}
    claimed.append(7)
    bench.scheduler.activate(claimed, 9)
    assert bench.step() == {"a": 1, "c": 1}


def test_abandoned_import_has_no_seat_and_keeps_its_blocks() -> None:
    bench = Bench(max_num_seqs=1)
    claimed = bench.make("c", 9)
    assert bench.scheduler.claim(claimed)
    bench.scheduler.start_import(claimed)
    bench.scheduler.abandon(claimed)
    bench.add("a", 3)
    assert bench.step() == {"a": 3}
    assert len(claimed.block_ids) == 3
    bench.scheduler.remove(claimed)
    bench.scheduler.remove(claimed)
    bench.scheduler.check_integrity()
