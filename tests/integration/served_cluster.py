"""Weir as real processes on loopback: started with a model, killed and stopped by their ids, read over HTTP.

Every process dies with this one. Waiting is polling with a deadline: another process has no event to wait for.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from prometheus_client.parser import text_string_to_metric_families

from tests.fakes.redis_server import RedisServer
from weir.cli.probes import free_ports
from weir.cli.supervisor import die_with_parent
from weir.runtime.config import child_environment

START_TIMEOUT_S = 120.0
POLL_S = 0.05
LOOPBACK = "127.0.0.1"
SECRET = "integration"


def wait_until(is_so: Callable[[], bool], what: str, timeout_s: float = START_TIMEOUT_S) -> float:
    """Poll until `is_so`; returns how long it took. Raises AssertionError naming `what` when it is never so."""
    started_s = time.monotonic()
    while not is_so():
        waited_s = time.monotonic() - started_s
        assert waited_s < timeout_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(POLL_S)
    return time.monotonic() - started_s


def http_get(url: str, timeout_s: float = 5.0) -> tuple[int, str]:
    """Status and body; status 0 when nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


class ServedProcess:
    """One of Weir's processes. `url` is where it answers /ready and /metrics."""

    def __init__(self, name: str, argv: list[str], *, url: str, log_path: Path) -> None:
        self.name = name
        self.url = url
        self.log_path = log_path
        self._argv = argv
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def start(self) -> None:
        environment = {"PYTHONPATH": str(Path.cwd()), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._argv,
                stdout=log,
                stderr=log,
                env=child_environment(environment | {"WEIR_TRANSFER_SECRET": SECRET}),
                preexec_fn=die_with_parent,
            )

    def is_ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"{self.name} has ended with {self._process.returncode}:\n{self.log}"
        return http_get(f"{self.url}/ready")[0] == 200

    def kill(self) -> None:
        """As kill -9; idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout_s: float) -> int:
        """The exit code."""
        assert self._process is not None
        return self._process.wait(timeout_s)

    def metrics(self) -> dict[str, float]:
        """Every sample's value by its name, summed over its labels."""
        status, body = http_get(f"{self.url}/metrics")
        assert status == 200, f"{self.name} gives no metrics: {status}"
        values: dict[str, float] = {}
        for family in text_string_to_metric_families(body):
            for sample in family.samples:
                values[sample.name] = values.get(sample.name, 0.0) + sample.value
        return values


class ServedCluster:
    """Redis, prefill and decode workers and, unless it is left out, a gateway; a context manager.

    Args:
        options: flags of both workers, such as `{"block-size": 16}`; `prefill` and `decode` add to them.
    """

    def __init__(
        self,
        model_dir: Path,
        directory: Path,
        *,
        num_prefill: int = 1,
        num_decode: int = 1,
        has_gateway: bool = True,
        options: dict[str, object] | None = None,
        prefill: dict[str, object] | None = None,
        decode: dict[str, object] | None = None,
        gateway: dict[str, object] | None = None,
    ) -> None:
        self._model_dir = model_dir
        self._directory = directory
        self.redis = RedisServer()
        shared: dict[str, object] = {"registration-ttl-s": 1.5, "num-threads": 1} | (options or {})
        self.prefill = [self._worker("prefill", index, shared | (prefill or {})) for index in range(num_prefill)]
        self.decode = [self._worker("decode", index, shared | (decode or {})) for index in range(num_decode)]
        self.gateway = self._gateway(gateway or {}) if has_gateway else None
        self._stack = ExitStack()

    @property
    def workers(self) -> list[ServedProcess]:
        return [*self.prefill, *self.decode]

    @property
    def processes(self) -> list[ServedProcess]:
        return [*self.workers, *([self.gateway] if self.gateway else [])]

    @property
    def url(self) -> str:
        """Of the gateway."""
        assert self.gateway is not None
        return self.gateway.url

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self.redis)
            for process in self.processes:
                stack.callback(process.kill)
                process.start()
            self._stack = stack.pop_all()
        try:
            self.wait_ready()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def wait_ready(self) -> None:
        """Until every process is, and the gateway too."""
        for process in self.processes:
            wait_until(process.is_ready, f"{process.name} is ready")

    def wait_at_rest(self, timeout_s: float = 20.0) -> None:
        """Until no worker that lives has a block in use, a sequence or a hold. Names what is left."""
        for process in self.workers:
            if process.is_alive:
                wait_until(lambda process=process: leftovers(process) == {}, f"{process.name} at rest", timeout_s)  # type: ignore[misc]

    def _worker(self, role: str, index: int, options: dict[str, object]) -> ServedProcess:
        (port,) = free_ports(1)
        flags = {
            "model-dir": self._model_dir,
            "redis-url": self.redis.url,
            "worker-id": f"{role}-{index}",
            "metrics-port": port,
            "device": "cpu",
        }
        return self._process(f"{role}-{index}", f"{role}_service", flags | options, port)

    def _gateway(self, options: dict[str, object]) -> ServedProcess:
        port, grpc_port = free_ports(2)
        self.grpc_address = f"{LOOPBACK}:{grpc_port}"
        flags = {
            "model-dirs": self._model_dir,
            "redis-url": self.redis.url,
            "host": LOOPBACK,
            "port": port,
            "grpc-port": grpc_port,
        }
        return self._process("gateway", "gateway", flags | options, port)

    def _process(self, name: str, module: str, flags: dict[str, object], port: int) -> ServedProcess:
        argv = [sys.executable, "-m", module]
        for flag, value in flags.items():
            argv.extend((f"--{flag}", str(value)))
        return ServedProcess(name, argv, url=f"http://{LOOPBACK}:{port}", log_path=self._directory / f"{name}.log")


def leftovers(process: ServedProcess) -> dict[str, float]:
    """Gauges of a worker that are not at their value of rest."""
    metrics = process.metrics()
    names = (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "weir_held_blocks",
        "weir_handoffs_in_flight",
        "weir_prefill_queued_tokens",
    )
    return {name: metrics[name] for name in names if metrics[name] > 0}
