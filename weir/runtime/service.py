"""How a process starts and ends: event loop, logging, signals, exit codes.

The first SIGTERM or SIGINT asks the process to drain, the second ends it at once. A setting or a checkpoint at fault is
one line on stderr and exit code 2; anything else that escapes is a traceback and exit code 1.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NoReturn

import uvloop

from weir.core.errors import ConfigError, ModelLoadError, find_error
from weir.runtime.logs import setup_logging

logger = logging.getLogger(__name__)

EXIT_FAILED = 1
EXIT_REFUSED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceContext:
    """What a process' main function is given.

    Attributes:
        stopping: set by the first signal, or by the process itself: stop taking work, finish, return.
    """

    name: str
    stopping: asyncio.Event = field(default_factory=asyncio.Event)


@contextmanager
def loading() -> Iterator[None]:
    """Import large libraries: what they bring stays, so the garbage collector need not walk it, now or ever after.

    Torch is imported in seven eighths of the time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def run_service(main: Callable[[ServiceContext], Awaitable[None]], *, name: str) -> NoReturn:
    """Run `main` to its end and exit the process: 0 when it returned, 2 for a refused setting or model, else 1.

    `main` reads its own configuration first (`load_config`), then calls `setup_logging` with it; before that, records
    go to the console at level info.
    """
    setup_logging()
    sys.exit(_run(main, name))


def _run(main: Callable[[ServiceContext], Awaitable[None]], name: str) -> int:
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(main, name))
    except Exception as exc:
        refusal = find_error(exc, ConfigError, ModelLoadError)
        if refusal is not None:
            print(f"{name}: {refusal.message}", file=sys.stderr)  # noqa: T201
            return EXIT_REFUSED
        logger.critical("%s ends: it failed", name, exc_info=exc)
        return EXIT_FAILED
    return 0


async def _serve(main: Callable[[ServiceContext], Awaitable[None]], name: str) -> None:
    context = ServiceContext(name=name)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _on_signal, context, number)
    await main(context)
    logger.info("%s stopped", name)


def _on_signal(context: ServiceContext, number: signal.Signals) -> None:
    if context.stopping.is_set():
        logger.warning("%s got %s again: exits at once", context.name, number.name)
        logging.shutdown()
        os._exit(128 + number)
    logger.info("%s got %s: drains", context.name, number.name)
    context.stopping.set()
