"""A part of `benchmarks.gpu` in a process of its own: what goes wrong in it, on the host or on the device, ends there,
its memory is free for the next, and it can be ended when it takes too long.

The processes are forked from one that has imported everything and touched no device.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

from benchmarks.floor import Floor, Peaks
from benchmarks.gpu_record import Card, Row

STOP_TIMEOUT_S = 15.0


class SectionFailed(Exception):
    """It did not come to its end; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What a section is told.

    Attributes:
        device: `cuda:0`, or `cpu` in a dry run.
        scratch: a directory for all sections, of room for the weights of a model.
        peaks: of the card, where they are known.
        done: names that the section has begun before.
    """

    device: str
    scratch: Path
    peaks: Peaks | None = None
    done: frozenset[str] = frozenset()

    @property
    def is_dry(self) -> bool:
        return self.device == "cpu"

    def share(self, floor: Floor, seconds: float) -> float | None:
        """How much of what the card can do `floor` in `seconds` is; None where nobody knows that."""
        return None if self.peaks is None else floor.seconds(self.peaks) / seconds


@dataclass(frozen=True, slots=True)
class Begun:
    """What a section turns to now: if nothing more comes, that was it."""

    name: str


Message = Card | Begun | Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the run.

    Attributes:
        module: has `measure(situation)`, which yields messages.
        limit_s: it is ended then; a dry run has no limit but the whole run's.
        least_s: with less left of the whole run it is not begun.
        is_resumable: after a failure it goes on with what it has not begun.
    """

    name: str
    module: str
    limit_s: float
    least_s: float
    is_resumable: bool = False

    def run(self, situation: Situation, processes: ForkServerContext, left_s: float) -> Iterator[Card | Row]:
        """What it finds; a failure is a row."""
        ends_s = time.monotonic() + (left_s if situation.is_dry else min(self.limit_s, left_s))
        done: set[str] = set()
        while True:
            last: str | None = None
            try:
                for message in self._messages(replace(situation, done=frozenset(done)), processes, ends_s):
                    if isinstance(message, Begun):
                        last = message.name
                        done.add(last)
                    else:
                        yield message
                return
            except SectionFailed as exc:
                yield Row(section=self.name, name=last or self.name, failure=str(exc))
            if not self.is_resumable or last is None or time.monotonic() >= ends_s:
                return

    def _messages(self, situation: Situation, processes: ForkServerContext, ends_s: float) -> Iterator[Message]:
        receiving, sending = processes.Pipe(duplex=False)
        process = processes.Process(target=_serve, args=(sending, self.module, situation))
        process.start()
        sending.close()
        try:
            while True:
                if not receiving.poll(max(0.0, ends_s - time.monotonic())):
                    raise SectionFailed("its time was up")
                try:
                    message = receiving.recv()
                except EOFError as exc:
                    process.join(STOP_TIMEOUT_S)
                    raise SectionFailed(f"its process ended with code {process.exitcode}") from exc
                if message is None:
                    return
                if isinstance(message, str):
                    raise SectionFailed(message)
                yield message
        finally:
            receiving.close()
            _stop(process)


def processes_of(sections: Sequence[Section]) -> ForkServerContext:
    """Where sections are started from; environment variables are those of now."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload([section.module for section in sections])
    return processes


def _serve(sending: Connection, module: str, situation: Situation) -> None:
    """Messages, then None, or a text that says what went wrong."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for message in import_module(module).measure(situation):
            sending.send(message)
        sending.send(None)
    except Exception as exc:  # noqa: BLE001 - the row says it
        traceback.print_exc()
        sending.send(" ".join(f"{type(exc).__name__}: {exc}".split())[:300])


def _stop(process: ForkServerProcess) -> None:
    """Interrupted, so that it ends what it has started; killed when it does not."""
    process.join(3.0)
    if process.is_alive() and process.pid is not None:
        os.kill(process.pid, signal.SIGINT)
        process.join(STOP_TIMEOUT_S)
    if process.is_alive():
        process.kill()
        process.join()
