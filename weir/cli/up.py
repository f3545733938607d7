"""`weir up`: a whole cluster on this machine from one command, until Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import uvloop

from weir.cli.local_cluster import LocalCluster
from weir.cli.preparation import PreparedModel, compile_kernels, prepare_model
from weir.cli.probes import check_redis_answers
from weir.cli.progress import Progress
from weir.cli.run_directory import RunDirectory
from weir.cli.supervisor import Supervisor
from weir.cli.up_config import DEFAULT_URL, UpConfig
from weir.runtime.config import load_config
from weir.runtime.ports import check_port_free

STOP_MARGIN_S = 5.0
"""Beyond the drain time that a service keeps itself."""


def up(argv: Sequence[str]) -> int:
    """Serve until told to stop; returns the exit code.

    Raises:
        WeirError: a busy port, a missing model, a setting that a service refuses, a service that never gets ready.
    """
    config = load_config(UpConfig, argv, prog="weir up")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(config))
    return 0


async def _serve(config: UpConfig) -> None:
    check_port_free(config.host, config.port, "port")
    check_port_free(config.host, config.grpc_port, "grpc_port")
    if config.redis is not None:
        await check_redis_answers(config.redis)
    progress = Progress()
    stopping = asyncio.Event()
    with ExitStack() as at_end:
        async with Supervisor(progress.changed) as supervisor:
            at_end.enter_context(_signals_handled(stopping, supervisor, progress))
            async with asyncio.TaskGroup() as group:
                starting = group.create_task(_start(config, supervisor, progress, at_end))
                await _until_done_or(stopping, starting)
            if not stopping.is_set():
                await stopping.wait()
            await _stop(supervisor, config.drain_s + STOP_MARGIN_S)
    progress.say("weir: stopped")


async def _start(config: UpConfig, supervisor: Supervisor, progress: Progress, at_end: ExitStack) -> None:
    """Returns when the cluster serves; says so.

    Args:
        at_end: gets what is to be done when all processes have ended.
    """
    home = config.home.expanduser().resolve()
    with progress:
        model = await prepare_model(config.model, home=home, progress=progress.working)
        await compile_kernels(config.kernel_cache_dir, progress=progress.working)
        progress.working("")
        run = RunDirectory.create(home)
        at_end.callback(run.remove_sockets)
        progress.say(f"weir: starting {model.name}; logs in {run.path}")
        cluster = LocalCluster.create(config, run)
        if config.redis is None:
            await supervisor.start(cluster.redis()).was_ready.wait()
        processes = [supervisor.start(spec) for spec in (*cluster.workers(model), cluster.gateway(model))]
        for process in processes:
            await process.was_ready.wait()
        elapsed_s = progress.elapsed_s
    for line in _ready_lines(config, model, elapsed_s):
        progress.say(line)


async def _until_done_or(stopping: asyncio.Event, task: asyncio.Task[None]) -> None:
    """Wait for `task`, or cancel it once `stopping` is set."""
    async with asyncio.TaskGroup() as group:
        cancelling = group.create_task(_cancel_on(stopping, task))
        await asyncio.wait([task])
        cancelling.cancel()


async def _cancel_on(event: asyncio.Event, task: asyncio.Task[None]) -> None:
    await event.wait()
    task.cancel()


async def _stop(supervisor: Supervisor, timeout_s: float) -> None:
    """The gateway first, so that what it has in flight can finish; then the workers; Redis last."""
    for roles in (("gateway",), ("decode", "prefill"), ("redis",)):
        async with asyncio.TaskGroup() as group:
            for process in supervisor.processes:
                if process.spec.name.partition("-")[0] in roles:
                    group.create_task(process.stop(timeout_s))


@contextmanager
def _signals_handled(stopping: asyncio.Event, supervisor: Supervisor, progress: Progress) -> Iterator[None]:
    """The first signal drains, the second ends everything at once."""

    def on_signal(number: signal.Signals) -> None:
        if stopping.is_set():
            supervisor.kill_all()
            os._exit(128 + number)
        progress.say("\nweir: stopping; running requests may finish (once more ends them)")
        stopping.set()

    loop, numbers = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _ready_lines(config: UpConfig, model: PreparedModel, elapsed_s: float) -> list[str]:
    key = " -H 'Authorization: Bearer KEY'" if config.api_keys else ""
    options = "" if config.url == DEFAULT_URL else f" --url {config.url}"
    options += " --api-key KEY" if config.api_keys else ""
    body = json.dumps({"model": model.name, "messages": [{"role": "user", "content": "What is a weir?"}]})
    return [
        f"weir: ready after {elapsed_s:.1f} s: {model.name} on {config.url}, gRPC on port {config.grpc_port}; "
        f"{config.num_prefill} prefill, {config.decode} decode",
        "",
        f"  curl {config.url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'",
        "",
        f"  `weir chat{options}` talks to it; Ctrl-C here stops it",
    ]
