"""Shows how far a measurement is, on stderr: a bar on a terminal, one line a run elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from weir.bench.exchange import Exchange

REFRESHES_PER_S = 2
"""The machine may be the server's too."""


class BenchProgress:
    """What `run_benchmark` tells, shown; a context manager."""

    def __init__(self, console: Console | None = None, *, is_quiet: bool = False) -> None:
        self._console = console or Console(stderr=True, highlight=False, quiet=is_quiet)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        failures = TextColumn("[red]{task.fields[failures]}")
        self._bars = Progress(
            *columns,
            failures,
            console=self._console,
            refresh_per_second=REFRESHES_PER_S,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._bar: TaskID | None = None
        self._num_failed = 0

    def __enter__(self) -> Self:
        self._bars.start()
        if self._console.is_terminal:
            self._bar = self._bars.add_task("making prompts, warming up", total=None, failures="")
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bars.stop()

    def run_begins(self, name: str, num_requests: int) -> None:
        if self._bar is None:
            self._console.print(f"weir bench: {name}: {num_requests} requests")
            return
        self._num_failed = 0
        self._bars.remove_task(self._bar)
        self._bar = self._bars.add_task(name, total=num_requests, failures="")

    def request_ended(self, exchange: Exchange) -> None:
        if self._bar is None:
            return
        self._num_failed += exchange.failure is not None
        failures = f"{self._num_failed} failed" if self._num_failed else ""
        self._bars.update(self._bar, advance=1, failures=failures)
