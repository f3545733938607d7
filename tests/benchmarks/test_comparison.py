from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks.comparison import Comparison, Goal, Kind, Measure, ServerRun

KINDS = {
    "Weir": Kind.WEIR,
    "Weir --aggregated": Kind.AGGREGATED,
    "Weir --aggregated, chunk 64": Kind.AGGREGATED_VARIANT,
    "A": Kind.PEER,
    "A, batch 256": Kind.PEER_VARIANT,
    "B": Kind.PEER,
}


def _runs(measure: Measure, **figures: Sequence[float | None]) -> list[ServerRun]:
    """One run of each server a figure; None is a repetition that failed."""
    names = {name.replace("-", "").replace(",", "").replace(" ", "_"): name for name in KINDS}
    return [
        ServerRun(
            server=names[key],
            repetition=repetition,
            figures={} if figure is None else {measure: figure},
            remarks=["it fell over"] if figure is None else [],
        )
        for key, values in figures.items()
        for repetition, figure in enumerate(values)
    ]


def _goal(comparison: Comparison, start: str) -> Goal:
    return next(goal for goal in comparison.goals() if goal.name.startswith(start))


def test_a_spread_is_the_median_with_its_lowest_and_highest() -> None:
    comparison = Comparison(KINDS, _runs(Measure.W1, Weir=[90, 120, 100]))
    spread = comparison.spread("Weir", Measure.W1)
    assert spread is not None
    assert (spread.median, spread.lowest, spread.highest) == (100, 90, 120)
    assert spread.show(1) == "100.0 (90.0 to 120.0)"


def test_a_ratio_is_of_the_medians_and_its_spread_that_of_each_repetition() -> None:
    comparison = Comparison(KINDS, _runs(Measure.W1, Weir=[90, 120, 100], A=[60, 100, 40]))
    ratio = comparison.ratio("Weir", "A", Measure.W1)
    assert ratio is not None
    assert ratio.median == pytest.approx(100 / 60)
    assert [ratio.lowest, ratio.highest] == pytest.approx([1.2, 2.5])


def test_a_ratio_takes_the_repetitions_that_both_have() -> None:
    comparison = Comparison(KINDS, _runs(Measure.W1, Weir=[100, 200, 300], A=[None, 100, None]))
    ratio = comparison.ratio("Weir", "A", Measure.W1)
    assert ratio is not None
    assert (ratio.median, ratio.lowest, ratio.highest) == (2, 2, 2)
    assert comparison.ratio("Weir", "B", Measure.W1) is None


@pytest.mark.parametrize(("measure", "best"), [(Measure.W2, "B"), (Measure.W5_BURST, "A"), (Measure.MEMORY, "A")])
def test_the_best_peer_is_the_highest_throughput_and_the_lowest_of_all_else(measure: Measure, best: str) -> None:
    comparison = Comparison(KINDS, _runs(measure, Weir=[9], A=[2], B=[3]))
    assert comparison.best(measure, Kind.PEER) == best


def test_a_goal_for_throughput_is_met_from_above() -> None:
    met = _goal(Comparison(KINDS, _runs(Measure.W3, Weir=[125], A=[90], B=[100])), "W3: tok/s, Weir / best")
    missed = _goal(Comparison(KINDS, _runs(Measure.W3, Weir=[124], A=[90], B=[100])), "W3: tok/s, Weir / best")
    assert (met.against, met.is_met, missed.is_met) == ("B", True, False)


def test_the_tail_is_held_against_peers_as_they_come_and_at_their_best_setting() -> None:
    runs = _runs(Measure.W5_BURST, Weir=[0.2], A=[3.0], A_batch_256=[0.15], B=[2.5])
    comparison = Comparison(KINDS, runs)
    default, best = (_goal(comparison, f"W5: {start}") for start in ("steady ITL p99 in the burst, Weir", "the same"))
    assert (default.against, default.is_met) == ("B", True)
    assert (best.against, best.is_met) == ("A, batch 256", False)


def test_the_tail_may_grow_by_three_times() -> None:
    alone = _runs(Measure.W5_ALONE, Weir=[0.05, 0.05])
    burst = _runs(Measure.W5_BURST, Weir=[0.14, 0.18])
    runs = [
        ServerRun(server="Weir", repetition=a.repetition, figures={**a.figures, **b.figures}, remarks=[])
        for a, b in zip(alone, burst, strict=True)
    ]
    goal = _goal(Comparison(KINDS, runs), "W5: steady ITL p99, burst / alone")
    assert goal.found is not None
    assert goal.found.show(1) == "3.2 (2.8 to 3.6)"
    assert goal.is_met is False


def test_split_is_held_against_aggregated_at_its_best_setting() -> None:
    runs = _runs(Measure.W5_BURST, Weir=[0.2], Weir_aggregated=[0.4], Weir_aggregated_chunk_64=[0.1])
    goal = _goal(Comparison(KINDS, runs), "W5: steady ITL p99 in the burst, split")
    assert (goal.against, goal.is_met) == ("Weir --aggregated, chunk 64", False)


def test_without_peers_there_is_a_table_and_no_verdict_on_them() -> None:
    comparison = Comparison({"Weir": Kind.WEIR}, _runs(Measure.W1, Weir=[100, 110, 120]))
    goal = _goal(comparison, "W1")
    assert (goal.found, goal.against, goal.is_met) == (None, None, None)
    assert "| Weir | 110.0 (100.0 to 120.0) | – |" in comparison.table()


def test_a_server_that_failed_is_a_row_with_a_remark() -> None:
    comparison = Comparison(KINDS, _runs(Measure.W1, Weir=[100, 100], A=[None, None], B=[50, None]))
    assert f"| A |{' – |' * 8}" in comparison.table()
    assert comparison.remarks() == ["A: it fell over (2 times)", "B: it fell over"]


def test_goodput_stands_beside_the_throughput() -> None:
    run = ServerRun(server="Weir", repetition=0, figures={Measure.W2: 80.0, Measure.W2_GOODPUT: 1.25}, remarks=[])
    assert "| 80.0; 1.25 |" in Comparison(KINDS, [run]).table()


def test_every_row_has_as_many_cells_as_its_head() -> None:
    tables = Comparison(KINDS, _runs(Measure.W1, Weir=[100], A=[50])).table().split("\n\n")
    for table in tables:
        assert len({line.count("|") for line in table.splitlines()}) == 1
