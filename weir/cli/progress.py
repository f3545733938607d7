"""Shows what `weir up` waits for: a live table on a terminal, one line a change elsewhere."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from weir.cli.supervisor import ProcessState, SupervisedProcess
from weir.core.deadline import Clock


@dataclass(slots=True)
class _Row:
    state: ProcessState
    detail: str
    since_s: float
    took_s: float | None = None


class Progress:
    """Rows are processes, in the order in which they were first heard of. Lines printed with `say` stay.

    The table lives from entry to exit of the `with`; afterwards every change is one line.
    """

    def __init__(self, console: Console | None = None, clock: Clock = time.monotonic) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._clock = clock
        self._rows: dict[str, _Row] = {}
        self._task = ""
        self._live: Live | None = None
        self._started_s = clock()

    def __enter__(self) -> Self:
        self._started_s = self._clock()
        if self._console.is_terminal:
            self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=8, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._started_s

    def say(self, line: str) -> None:
        """Print a line that stays."""
        self._console.print(Text(line), soft_wrap=True)

    def working(self, task: str) -> None:
        """What goes on now that is no process of the table; empty for nothing."""
        if task and task != self._task and self._live is None:
            self.say(f"weir: {task}")
        self._task = task

    def changed(self, process: SupervisedProcess) -> None:
        """A process has a new state."""
        name, now_s = process.spec.name, self._clock()
        previous = self._rows.get(name)
        row = _Row(process.state, process.detail, process.since_s)
        if process.state is ProcessState.READY:
            row.took_s = now_s - (previous.since_s if previous is not None else now_s)
        self._rows[name] = row
        if process.state is ProcessState.WAITING or (self._live is None and process.state is not ProcessState.STOPPED):
            self.say(f"weir: {name} {self._describe(row)}")

    def _describe(self, row: _Row) -> str:
        if row.took_s is not None:
            return f"ready after {row.took_s:.1f} s"
        return row.detail or row.state.value

    def _render(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for name, row in list(self._rows.items()):  # drawn in a thread of its own
            is_done = row.state is ProcessState.READY
            mark = Text("✓", style="green") if is_done else Spinner("dots")
            elapsed = row.took_s if row.took_s is not None else self._clock() - row.since_s
            table.add_row(mark, name, row.detail or row.state.value, f"{elapsed:.1f} s")
        if self._task:
            table.add_row(Spinner("dots"), "model", Text(self._task, overflow="ellipsis", no_wrap=True), "")
        return table
