"""What `benchmarks.gpu` found, its table and its JSON. Measures nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.floor import Peaks

SCHEMA = 1
NOTHING = "–"
CARD_SECTION, COPY, PRODUCT = "card", "copy", "bfloat16 product"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure, or one comparison.

    Attributes:
        name: unique within its section.
        shape: what was computed.
        figure: in `unit`; None where only results were compared, or nothing came of it.
        num_bytes, flops: what the computation does at least.
        share: of what the card can do; 1 is all.
        goal: the least share, or the largest where `is_ceiling`.
        error, tolerance: of results against a plain computation, and the largest that is right.
        failure: why it has no figure.
        remark: what a reader must know.
    """

    section: str
    name: str
    shape: str = ""
    figure: float | None = None
    unit: str = ""
    num_bytes: int | None = None
    flops: int | None = None
    share: float | None = None
    goal: float | None = None
    is_ceiling: bool = False
    error: float | None = None
    tolerance: float | None = None
    failure: str = ""
    remark: str = ""

    @property
    def is_right(self) -> bool | None:
        """Whether its results are; None where none were compared. An error that is no number is wrong."""
        if self.failure:
            return False
        if self.error is None or self.tolerance is None:
            return None
        return self.error <= self.tolerance

    @property
    def meets_goal(self) -> bool | None:
        if self.goal is None or self.share is None:
            return None
        return self.share <= self.goal if self.is_ceiling else self.share >= self.goal


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What was measured on.

    Attributes:
        name, driver: of the GPU; in a dry run of nothing.
    """

    name: str
    driver: str
    python: str
    torch: str
    triton: str
    transformers: str


@dataclass(slots=True, kw_only=True)
class Record:
    """One run.

    Attributes:
        is_dry: figures mean nothing.
        skipped: sections that were left out, and why.
    """

    date: str
    commit: str
    is_dry: bool
    card: Card | None = None
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; an error that is no number is null with its failure beside it."""
        return {"schema": SCHEMA, **asdict(self)}

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: Path) -> Record:
        """What `save` wrote. Raises ValueError for another schema."""
        content: dict[str, Any] = json.loads(path.read_text())
        if content.pop("schema") != SCHEMA:
            raise ValueError(f"{path}: of another schema than {SCHEMA}")
        card: Mapping[str, str] | None = content.pop("card")
        rows = [Row(**row) for row in content.pop("rows")]
        return cls(**content, rows=rows, card=None if card is None else Card(**card))

    @property
    def peaks(self) -> Peaks | None:
        """What the card was seen to do; None where it was not."""
        figures = {row.name: row.figure for row in self.rows if row.section == CARD_SECTION}
        copied, multiplied = figures.get(COPY), figures.get(PRODUCT)
        if copied is None or multiplied is None:
            return None
        return Peaks(bytes_per_s=copied * 1e9, flops_per_s=multiplied * 1e12)

    @property
    def is_right(self) -> bool:
        """Whether nothing failed and no result was wrong."""
        return all(row.is_right is not False for row in self.rows)

    def table(self) -> str:
        """Everything, in Markdown."""
        card = self.card
        where = "no card" if card is None else f"{card.name}, driver {card.driver}, torch {card.torch}"
        if card is not None:
            where += f", Triton {card.triton}, transformers {card.transformers}, Python {card.python}"
        lines = [
            f"{self.date}, {self.commit}: {where}; {self.seconds:.0f} s",
            *(["", "**Dry run: no figure means anything.**"] if self.is_dry else []),
            "",
            "| section | what | shape | figure | share | goal | error / limit | |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |",
            *(_line(replace(row, share=None) if self.is_dry else row) for row in self.rows),
            *(f"| {section} | {NOTHING} | | | | | | skipped: {why} |" for section, why in self.skipped.items()),
        ]
        return "\n".join(lines)


def _line(row: Row) -> str:
    columns = (
        row.section,
        row.name,
        row.shape,
        show_figure(row.figure, row.unit),
        NOTHING if row.share is None else f"{row.share:.1%}",
        _show_goal(row),
        NOTHING if row.error is None else f"{row.error:.1e} / {row.tolerance:.0e}",
        _remarks(row),
    )
    return f"| {' | '.join(columns)} |"


def show_figure(figure: float | None, unit: str) -> str:
    """Seconds as what suits them; others with three digits or all before the point."""
    if figure is None:
        return NOTHING
    if unit == "s":
        scale, name = next(
            ((scale, name) for scale, name in ((1.0, "s"), (1e3, "ms")) if figure * scale >= 1), (1e6, "us")
        )
        return f"{figure * scale:.4g} {name}"
    return f"{figure:,.0f} {unit}" if figure >= 100 else f"{figure:.3g} {unit}"


def _show_goal(row: Row) -> str:
    if row.goal is None:
        return NOTHING
    bound = f"{'≤' if row.is_ceiling else '≥'} {row.goal:.0%}"
    return bound if row.meets_goal is None else f"{bound} {'met' if row.meets_goal else 'MISSED'}"


def _remarks(row: Row) -> str:
    words = [row.remark] if row.remark else []
    if row.failure:
        words.insert(0, f"FAILED: {row.failure}")
    elif row.is_right is False:
        words.insert(0, "WRONG")
    return "; ".join(words).replace("|", "/").replace("\n", " ")
