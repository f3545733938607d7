"""The table of `benchmarks.peers`: medians, spreads and ratios of what was measured. Starts nothing, reads no file."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

ABSENT = "–"
MEMORY_BOUND_MIB = 1430
"""1.5 GB."""


class Measure(Enum):
    """What is measured of a server; the value is its name in the record."""

    W1 = "w1_tokens_per_s"
    W2 = "w2_tokens_per_s"
    W3 = "w3_tokens_per_s"
    W4 = "w4_tokens_per_s"
    W1_GOODPUT = "w1_goodput_requests_per_s"
    W2_GOODPUT = "w2_goodput_requests_per_s"
    W3_GOODPUT = "w3_goodput_requests_per_s"
    W4_GOODPUT = "w4_goodput_requests_per_s"
    W5_ALONE = "w5_alone_itl_p99_s"
    W5_BURST = "w5_burst_itl_p99_s"
    W5_TTFT = "w5_burst_ttft_p50_s"
    START = "start_s"
    MEMORY = "memory_mib"


THROUGHPUTS = {
    Measure.W1: Measure.W1_GOODPUT,
    Measure.W2: Measure.W2_GOODPUT,
    Measure.W3: Measure.W3_GOODPUT,
    Measure.W4: Measure.W4_GOODPUT,
}
"""Each with the goodput that is shown beside it."""


class Kind(Enum):
    """Whose server it is, and how it is set: a variant has one setting changed for W5, and is measured on W5 only."""

    WEIR = "Weir, split"
    AGGREGATED = "Weir, aggregated"
    AGGREGATED_VARIANT = "Weir, aggregated, for W5"
    PEER = "peer"
    PEER_VARIANT = "peer, for W5"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRun:
    """One server in one repetition.

    Attributes:
        figures: what could be measured.
        remarks: what could not, and what a reader must know of the rest.
    """

    server: str
    repetition: int
    figures: Mapping[Measure, float]
    remarks: Sequence[str]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**asdict(self), "figures": {measure.value: figure for measure, figure in self.figures.items()}}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> ServerRun:
        """What `to_dict` gave."""
        figures = {Measure(name): figure for name, figure in content["figures"].items()}
        return cls(**{**content, "figures": figures})


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Of one figure over the repetitions."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def over(cls, values: Sequence[float]) -> Spread:
        return cls(median=statistics.median(values), lowest=min(values), highest=max(values))

    def show(self, digits: int, scale: float = 1.0) -> str:
        """The median, lowest and highest in brackets where they differ, all times `scale`."""
        median, lowest, highest = (f"{value * scale:,.{digits}f}" for value in (self.median, self.lowest, self.highest))
        return median if lowest == highest else f"{median} ({lowest} to {highest})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What a figure of Weir must reach, and what was found.

    Attributes:
        found: None where one of the sides could not be measured.
        against: the server that Weir was compared with.
        is_floor: whether `bound` must be reached from above; else it must not be passed.
    """

    name: str
    found: Spread | None
    against: str | None
    bound: float
    is_floor: bool

    @property
    def is_met(self) -> bool | None:
        if self.found is None:
            return None
        return self.found.median >= self.bound if self.is_floor else self.found.median <= self.bound


class Comparison:
    """All runs of all servers.

    Args:
        kinds: of each server by its name, in the order of the rows.
    """

    def __init__(self, kinds: Mapping[str, Kind], runs: Sequence[ServerRun]) -> None:
        self._kinds = kinds
        self._runs = runs

    def spread(self, server: str, measure: Measure) -> Spread | None:
        """None where no repetition has the figure."""
        values = list(self._by_repetition(server, measure).values())
        return Spread.over(values) if values else None

    def growth(self, server: str) -> Spread | None:
        """How many times longer the tail of W5's steady streams is during the burst than alone."""
        return _ratio(self._by_repetition(server, Measure.W5_BURST), self._by_repetition(server, Measure.W5_ALONE))

    def ratio(self, server: str, other: str, measure: Measure) -> Spread | None:
        """`server` over `other`; None where no repetition has both figures."""
        return _ratio(self._by_repetition(server, measure), self._by_repetition(other, measure))

    def best(self, measure: Measure, *kinds: Kind) -> str | None:
        """The server of these kinds with the best median: the highest throughput, the lowest of all others."""
        medians = {
            server: spread.median
            for server, kind in self._kinds.items()
            if kind in kinds and (spread := self.spread(server, measure)) is not None
        }
        choose = max if measure in THROUGHPUTS else min
        return choose(medians, key=medians.__getitem__, default=None)

    def goals(self) -> list[Goal]:
        """Of Weir as it comes, split, against the best of its peers and against itself in one process."""
        any_setting = (Kind.PEER, Kind.PEER_VARIANT)
        throughputs = {Measure.W1: 1.3, Measure.W2: 1.5, Measure.W3: 1.25, Measure.W4: 1.5}
        return [
            *(
                self._goal(f"{measure.name}: tok/s, Weir / best peer", measure, (Kind.PEER,), bound, is_floor=True)
                for measure, bound in throughputs.items()
            ),
            self._own_goal("W5: steady ITL p99, burst / alone", self.growth, 3.0),
            self._goal(
                "W5: steady ITL p99 in the burst, Weir / best peer as it comes", Measure.W5_BURST, (Kind.PEER,), 0.1
            ),
            self._goal("W5: the same, Weir / best peer at its best setting", Measure.W5_BURST, any_setting, 1.0),
            self._goal("W5: burst TTFT p50, Weir / best peer at its best setting", Measure.W5_TTFT, any_setting, 1.3),
            self._own_goal("start to ready, s", lambda server: self.spread(server, Measure.START), 8.0),
            self._own_goal("memory, MiB", lambda server: self.spread(server, Measure.MEMORY), MEMORY_BOUND_MIB),
            *(
                self._goal(
                    f"{measure.name}: tok/s, split / aggregated", measure, (Kind.AGGREGATED,), 0.85, is_floor=True
                )
                for measure in (Measure.W2, Measure.W3)
            ),
            self._goal(
                "W5: steady ITL p99 in the burst, split / aggregated at its best setting",
                Measure.W5_BURST,
                (Kind.AGGREGATED, Kind.AGGREGATED_VARIANT),
                1.0,
            ),
        ]

    def table(self) -> str:
        """Markdown: what was measured, a row for each server, and under it the goals."""
        header = (
            "server",
            *(f"{measure.name}: tok/s; goodput, req/s" for measure in THROUGHPUTS),
            "W5: steady ITL p99, ms, alone → during the burst",
            "W5: burst TTFT p50, s",
            "start to ready, s",
            "memory, MiB",
        )
        servers = _markdown(header, [(server, *self._cells(server)) for server in self._kinds])
        goals = _markdown(
            ("ratio", "measured", "against", "must be", "met"), [_goal_cells(goal) for goal in self.goals()]
        )
        return f"{servers}\n\n{goals}"

    def remarks(self) -> list[str]:
        """Each once, with the server that it is about and how often it was made."""
        counts = Counter(f"{run.server}: {remark}" for run in self._runs for remark in run.remarks)
        return [text if count == 1 else f"{text} ({count} times)" for text, count in counts.items()]

    def _by_repetition(self, server: str, measure: Measure) -> dict[int, float]:
        return {
            run.repetition: run.figures[measure]
            for run in self._runs
            if run.server == server and measure in run.figures
        }

    def _goal(
        self, name: str, measure: Measure, others: Sequence[Kind], bound: float, *, is_floor: bool = False
    ) -> Goal:
        weir, other = self.best(measure, Kind.WEIR), self.best(measure, *others)
        found = self.ratio(weir, other, measure) if weir and other else None
        return Goal(name=name, found=found, against=other, bound=bound, is_floor=is_floor)

    def _own_goal(self, name: str, of: Callable[[str], Spread | None], bound: float) -> Goal:
        found = next((of(server) for server, kind in self._kinds.items() if kind is Kind.WEIR), None)
        return Goal(name=name, found=found, against=None, bound=bound, is_floor=False)

    def _cells(self, server: str) -> list[str]:
        def shown(measure: Measure, digits: int, scale: float = 1.0) -> str:
            spread = self.spread(server, measure)
            return spread.show(digits, scale) if spread else ABSENT

        cells = []
        for measure, goodput in THROUGHPUTS.items():
            good = self.spread(server, goodput)
            cells.append(shown(measure, 1) + (f"; {good.median:.2f}" if good else ""))
        growth = self.growth(server)
        tail = f"{shown(Measure.W5_ALONE, 0, 1000)} → {shown(Measure.W5_BURST, 0, 1000)}"
        cells.append(f"{tail}: {growth.median:.1f} x" if growth else ABSENT)
        return [*cells, shown(Measure.W5_TTFT, 1), shown(Measure.START, 1), shown(Measure.MEMORY, 0)]


def _ratio(upper: Mapping[int, float], lower: Mapping[int, float]) -> Spread | None:
    """Of the medians, with the spread of the ratios within a repetition, where the machine was much the same."""
    both = upper.keys() & lower.keys()
    if not both:
        return None
    pairs = [upper[repetition] / lower[repetition] for repetition in both]
    medians = statistics.median(upper[key] for key in both) / statistics.median(lower[key] for key in both)
    return Spread(median=medians, lowest=min(pairs), highest=max(pairs))


def _goal_cells(goal: Goal) -> tuple[str, ...]:
    bound = f"{'at least' if goal.is_floor else 'at most'} {goal.bound:,g}"
    found = goal.found.show(0 if goal.bound > 100 else 2) if goal.found else ABSENT
    met = {True: "yes", False: "no", None: ABSENT}[goal.is_met]
    return (goal.name, found, goal.against or "", bound, met)


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows))
