"""The one thread that owns torch, and the way into it: an inbox that is emptied between two steps.

It knows commands and the `Engine`, no sequence. Commands go in as functions of the engine; answers and news come back
with `call_soon_threadsafe`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from weir.core.deadline import Clock
from weir.core.errors import HopFailedError, UnavailableError, WeirError
from weir.engine.cold_blocks import LOAD_POLL_S, open_cold_blocks
from weir.engine.config import EngineConfig
from weir.engine.engine import Engine
from weir.engine.kv_events import KvEvents
from weir.engine.outbox import Deliver
from weir.engine.step_computation import Runner

logger = logging.getLogger(__name__)

T = TypeVar("T")

STOP_TIMEOUT_S = 30.0
IDLE_CHECK_AFTER_S = 1.0
MAX_IDLE_CHECK_BLOCKS = 1 << 16
"""A walk of 65,536 blocks takes some 25 ms; larger pools are checked on demand only."""


class EngineThread:
    """Loads a model, then alternates commands and steps; sleeps on the inbox while there is nothing to compute.

    A command or a step that raises what is no `WeirError` ends the engine: every sequence gets an error, every later
    call is answered with one, and nobody waits for ever.

    Args:
        load_runner: makes the model; called in the thread.
        deliver: takes the sequences' news, on the loop.

    Attributes:
        engine: set once `start` has returned. Only its `stats`, `meter`, and the runner's memory may be touched from
            outside the thread.
    """

    engine: Engine

    def __init__(
        self, config: EngineConfig, *, load_runner: Callable[[EngineConfig], Runner], deliver: Deliver, clock: Clock
    ) -> None:
        self._config = config
        self._load_runner = load_runner
        self._deliver = deliver
        self._clock = clock
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._event_readers: deque[asyncio.Future[KvEvents]] = deque()
        self._is_stopped = False
        self._is_checked = False

    async def start(self) -> None:
        """Load the model off the loop; what the loading raises comes out here."""
        self._loop = asyncio.get_running_loop()
        started: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="engine", daemon=True)
        self._thread.start()
        try:
            await started
        except asyncio.CancelledError:
            self._inbox.put(None)
            raise

    async def stop(self) -> None:
        """End after the step under way; whoever still waits gets an error. A step that hangs is left behind."""
        self._is_stopped = True
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join, STOP_TIMEOUT_S)
        if self._thread.is_alive():
            logger.error("a step still runs %g s after the engine was told to stop", STOP_TIMEOUT_S)

    def post(self, command: Callable[[Engine], None]) -> None:
        """Run a command between two steps; nobody waits for it, and an engine that has ended ignores it."""

        def run() -> None:
            if self.engine.meter.failure is None:
                command(self.engine)

        if not self._is_stopped:
            self._inbox.put(run)

    def fail(self, error: BaseException) -> None:
        """Something that the engine relies on is broken: it computes nothing more."""

        def run() -> None:
            raise RuntimeError("its blocks cannot be copied") from error

        self._inbox.put(run)

    async def call(self, command: Callable[[Engine], T]) -> T:
        """Run a command between two steps. It runs even if the caller is cancelled meanwhile.

        Raises:
            UnavailableError: the engine cannot go on, or has stopped.
        """
        if self._is_stopped:
            raise UnavailableError("the engine has stopped")
        future: asyncio.Future[T] = self._loop.create_future()

        def run() -> None:
            try:
                if self.engine.meter.failure is not None:
                    raise UnavailableError(self.engine.meter.failure)
                result = command(self.engine)
            except Exception as exc:
                self._to_loop(_fail, future, exc)
                if not isinstance(exc, WeirError):
                    raise
            else:
                self._to_loop(_succeed, future, result)

        self._inbox.put(run)
        return await future

    async def kv_events(self) -> KvEvents:
        """Wait for changes of the prefix cache, one reader at a time. Raises as `call` does."""
        future: asyncio.Future[KvEvents] = self._loop.create_future()
        try:
            await self.call(lambda engine: self._event_readers.append(future))
            return await future
        except asyncio.CancelledError:  # what is on its way to this reader is lost
            future.cancel()
            self.post(lambda engine: engine.restart_kv_events())
            raise

    def _hand_over_events(self, reader: asyncio.Future[KvEvents], events: KvEvents) -> None:
        if reader.done():  # cancelled, and what it took is lost
            self.post(lambda engine: engine.restart_kv_events())
        else:
            reader.set_result(events)

    def _to_loop(self, callback: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(callback, *args)

    # In the thread

    def _run(self, started: asyncio.Future[None]) -> None:
        try:
            runner = self._load_runner(self._config)
            runner.warm_up()
            self.engine = Engine(
                runner,
                self._config,
                deliver=lambda news: self._to_loop(self._deliver, news),
                cold=open_cold_blocks(self._config, runner.cache),
                clock=self._clock,
            )
        except Exception as exc:
            logger.debug("the engine could not start", exc_info=True)
            self._to_loop(_fail, started, exc)
            return
        self._to_loop(_succeed, started, None)
        is_going = True
        while is_going:
            try:
                is_going = self._serve(self.engine)
            except Exception as exc:
                # From here on there are no steps, and commands are answered with this failure.
                logger.critical("the engine cannot go on", exc_info=True)
                self._end(HopFailedError(f"the engine cannot go on: {type(exc).__name__}: {exc}"))
        self._end(UnavailableError("the engine has stopped"))

    def _serve(self, engine: Engine) -> bool:
        """Commands and steps until told to stop, which is answered with False."""
        has_work = False
        while self._rest(engine) if has_work else self._idle(engine):
            if engine.meter.failure is None:
                has_work = engine.step()
                if self._event_readers and engine.has_kv_events:
                    self._to_loop(self._hand_over_events, self._event_readers.popleft(), engine.take_kv_events())
        return False

    def _idle(self, engine: Engine) -> bool:
        """Nothing can be computed: sleep until commands come, and run them, or until a deadline or a look after loads.

        False means stop.
        """
        try:
            command = self._inbox.get(timeout=self._idle_timeout_s(engine))
        except queue.Empty:
            if not engine.is_loading:
                self._check_idle(engine)
            return True
        return self._run_commands(engine, command)

    def _rest(self, engine: Engine) -> bool:
        """Between two steps: run the commands that are there, or come while the engine rests. False means stop."""
        started_s = self._clock()
        while True:
            rest_s = max(0.0, started_s + engine.rest_s() - self._clock())
            try:
                command = self._inbox.get(block=rest_s > 0, timeout=rest_s)
            except queue.Empty:
                return True
            if not self._run_commands(engine, command):
                return False
            if not rest_s:
                return True

    def _run_commands(self, engine: Engine, command: Callable[[], None] | None) -> bool:
        """Run `command` and what else is in the inbox. False means stop."""
        self._is_checked = False
        # No more than are here now: a flood of commands must not hold up the next step.
        for _ in range(self._inbox.qsize()):
            if command is None:
                return False
            command()
            command = self._inbox.get_nowait()
        if command is None:
            return False
        command()
        engine.update_stats()
        engine.flush()
        return True

    def _idle_timeout_s(self, engine: Engine) -> float | None:
        if engine.meter.failure is not None:
            return None
        if engine.is_loading:
            return LOAD_POLL_S
        bounds = (engine.seconds_to_deadline(), None if self._is_checked else IDLE_CHECK_AFTER_S)
        return min((bound for bound in bounds if bound is not None), default=None)

    def _check_idle(self, engine: Engine) -> None:
        """Once in every idle time, look for broken laws while nobody waits."""
        if not self._is_checked:
            self._is_checked = True
            if engine.stats.total_blocks <= MAX_IDLE_CHECK_BLOCKS:
                engine.check_integrity()

    def _end(self, error: WeirError) -> None:
        """Nobody may wait for this engine any more."""
        if self.engine.meter.failure is None:
            self.engine.fail_all(error)
        while self._event_readers:
            self._to_loop(_fail, self._event_readers.popleft(), error)


def _succeed(future: asyncio.Future[T], result: T) -> None:
    """Answer a call, on the loop; its caller may have left."""
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
