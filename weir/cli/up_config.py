"""The settings of `weir up`. What is not here reaches the services through their own `WEIR_` variables."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from weir.core.errors import ConfigError
from weir.runtime.config import setting

DEFAULT_URL = "http://127.0.0.1:8000"
"""Of the gateway, with the settings below as they are."""


@dataclass(frozen=True, kw_only=True)
class UpConfig:
    """Serve one model on this machine: a Redis-compatible server, prefill and decode workers, and the gateway.

    Settings of the services go to them through their own variables, such as WEIR_MAX_NUM_SEQS.
    """

    model: str = setting("smollm2", help="a directory, a .gguf file, hf:org/name, or a known name")
    prefill: int = setting(1, help="prefill workers", minimum=0, maximum=64)
    decode: int = setting(1, help="decode workers", minimum=1, maximum=64)
    aggregated: bool = setting(False, help="no prefill workers: each decode worker does both")
    redis: str | None = setting(None, help="URL of a running Redis or Valkey; none starts an embedded one")
    host: str = setting("127.0.0.1", help="address of the gateway")
    port: int = setting(8000, help="HTTP port of the gateway", minimum=1, maximum=65535)
    grpc_port: int = setting(8001, help="gRPC port of the gateway", minimum=1, maximum=65535)
    api_keys: tuple[str, ...] = setting((), help="keys that clients must send; none asks for no key", secret=True)
    block_size: int = setting(16, help="tokens in a KV block", minimum=1, maximum=4096)
    max_model_len: int | None = setting(None, help="longest sequence; none takes the model's own", minimum=1)
    kv_cache_memory_bytes: int | None = setting(None, help="memory of each worker's KV pool", minimum=1)
    gpu_memory_utilization: float | None = setting(
        None,
        help="share of a GPU's memory for each worker; none: 0.9, or less where workers outnumber the GPUs",
        minimum=0.05,
        maximum=1.0,
    )
    num_threads: int | None = setting(
        None, help="compute threads of each worker; none: all cores for a pair, fewer for more", minimum=1, maximum=1024
    )
    prefill_nice: int = setting(10, help="niceness of prefill workers: decode goes first", minimum=0, maximum=19)
    decode_compute_share: float = setting(
        0.35,
        help="share of the time for decode steps while prompts are computed; 1 makes no rests",
        minimum=0.05,
        maximum=1.0,
    )
    drain_s: float = setting(30.0, help="how long running requests may go on after Ctrl-C", minimum=0)
    home: Path = setting(Path("~/.cache/weir"), help="where models and logs are kept")

    def validate(self) -> None:
        """What no single field says. Raises ConfigError."""
        if self.port == self.grpc_port:
            raise ConfigError(f"grpc_port: {self.grpc_port} is the port of HTTP already", param="grpc_port")
        if self.aggregated and self.prefill > 1:
            raise ConfigError(f"prefill: aggregated has no prefill workers, and {self.prefill} are asked for")

    @property
    def kernel_cache_dir(self) -> Path:
        """Where compiled CPU kernels are kept, for all workers."""
        return self.home.expanduser().resolve() / "kernels"

    @property
    def num_prefill(self) -> int:
        return 0 if self.aggregated else self.prefill

    @property
    def reachable_host(self) -> str:
        """Where this machine itself finds the gateway."""
        return "127.0.0.1" if self.host in ("0.0.0.0", "", "::") else self.host

    @property
    def url(self) -> str:
        host = f"[{self.reachable_host}]" if ":" in self.reachable_host else self.reachable_host
        return f"http://{host}:{self.port}"
