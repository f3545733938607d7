"""The settings that every worker has, whichever its role.

Pure values, checked before anything loads: nothing here imports torch, and a wrong setting costs no model load.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from weir.core.errors import ConfigError
from weir.core.redis_url import RedisUrl
from weir.engine.config import DTYPES, KV_CACHE_DTYPES, QUANTIZATIONS, TRANSFER_MEMORIES, EngineConfig
from weir.runtime.config import setting
from weir.runtime.logs import FORMATS, LEVELS


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """One worker process: its model, its engine, its place in the cluster."""

    model_dir: Path = setting(help="prepared model directory")
    redis_url: str = setting(
        "redis://127.0.0.1:6379/0",
        help="registry, request states and prefix index; also rediss, unix, redis+sentinel, redis+cluster",
    )
    worker_id: str | None = setting(None, help="name in the cluster; none draws one")

    host: str = setting("127.0.0.1", help="address to listen on: gRPC, metrics, KV transfer")
    port: int = setting(0, help="gRPC port; 0 takes a free one", minimum=0, maximum=65535)
    advertise_address: str | None = setting(
        None, help="address that others reach this worker at; none takes the host, or the interface that reaches Redis"
    )
    metrics_port: int = setting(
        0,
        help="HTTP port of /metrics, /health and /ready; 0 takes a free one, which the log names",
        minimum=0,
        maximum=65535,
    )
    transfer_secret: str = setting(
        "",
        help="shared by all workers; proves a peer of the KV transfer. Without one anybody may ask for KV",
        secret=True,
    )

    dtype: str = setting("auto", help="weights and activations", choices=DTYPES)
    kv_cache_dtype: str = setting(
        "auto",
        help="keys and values in the cache; fp8 on GPUs of compute capability 8.9 or more",
        choices=KV_CACHE_DTYPES,
    )
    device: str = setting(
        "auto",
        help="where the model runs: cpu, cuda (the emptiest GPU with room), cuda:N, or auto: cuda, or cpu without one",
    )
    block_size: int = setting(16, help="tokens in a KV block", minimum=1, maximum=4096)
    num_blocks: int | None = setting(
        None, help="KV blocks in the pool; wins over the memory settings", minimum=1, maximum=2**31 - 1
    )
    kv_cache_memory_bytes: int | None = setting(
        None,
        help="memory of the KV pool; none: on a CPU 320 MiB or one longest sequence, else gpu_memory_utilization",
        minimum=1,
    )
    host_kv_cache_bytes: int = setting(
        0, help="host memory for KV blocks that the pool had to give up; 0 keeps none", minimum=0
    )
    disk_kv_cache_bytes: int = setting(
        0, help="file for KV blocks that host memory had to give up; 0 keeps none", minimum=0
    )
    disk_kv_cache_dir: Path | None = setting(
        None, help="where that file is made, without a name: it goes with the process"
    )
    gpu_memory_utilization: float = setting(0.9, help="share of the GPU's memory to use", minimum=0.05, maximum=1.0)
    device_claim_dir: Path = setting(
        Path("~/.cache/weir/devices"), help="where workers of one host write down which share of which GPU they take"
    )
    batch_invariant: bool = setting(
        False, help="tokens of a sequence do not depend on its batch, at the cost of speed on a GPU"
    )
    cuda_graphs: bool = setting(True, help="on a GPU, record decode steps at the start and replay them")
    max_num_seqs: int = setting(64, help="most sequences in one step", minimum=1, maximum=65536)
    max_num_batched_tokens: int | None = setting(
        None,
        help="most tokens in one step, the size of a prefill chunk; none takes 256 on a CPU, 8192 on a GPU",
        minimum=1,
        maximum=2**20,
    )
    max_model_len: int | None = setting(None, help="longest sequence; none takes the model's own", minimum=1)
    enable_prefix_caching: bool = setting(True, help="keep finished blocks and reuse them")
    quantization: str = setting(
        "auto",
        help="weights: none as dtype, auto with the checkpoint's bits, int8, or int4, on a CPU only where it has four",
        choices=QUANTIZATIONS,
    )
    num_threads: int | None = setting(
        None, help="compute threads; none leaves the number to torch", minimum=1, maximum=1024
    )
    compute_share: float = setting(
        1.0,
        help="share of the time for steps while KV for sequences here is computed elsewhere; "
        "below 1 where prefill workers have the same cores",
        minimum=0.05,
        maximum=1.0,
    )
    transfer_staging_bytes: int = setting(
        64 << 20,
        help="pinned host memory through which KV on a GPU goes to other workers or comes from them",
        minimum=1,
    )
    transfer_memory: str = setting(
        "none",
        help="workers alike in this copy KV out of each other's GPUs: cuda_ipc on one host, nixl between hosts; "
        "not yet measured",
        choices=TRANSFER_MEMORIES,
    )
    kernel_cache_dir: Path = setting(
        Path("~/.cache/weir/kernels"), help="where the CPU kernels are kept that the first start compiles"
    )
    tensor_parallel_size: int = setting(1, help="GPUs of one worker; only 1 is supported", minimum=1)

    max_queued_requests: int = setting(512, help="requests that may wait here; more are refused", minimum=1)
    registration_ttl_s: float = setting(
        6.0, help="a worker silent for this long is gone; set it alike everywhere", minimum=0.5
    )
    drain_s: float = setting(30.0, help="how long running work may go on after SIGTERM", minimum=0.0)
    nice: int = setting(0, help="scheduling niceness added at start", minimum=0, maximum=19)

    log_level: str = setting("info", help="least severe record to log", choices=LEVELS)
    log_format: str = setting("console", help="for people or as JSON", choices=FORMATS)
    otlp_endpoint: str | None = setting(None, help="where traces go, such as http://127.0.0.1:4317; none makes none")
    legacy_aliases: bool = setting(False, help="also give metrics under the former names that dashboards may use")

    def validate(self) -> None:
        """What no single field says. Raises ConfigError naming the field, the value and the limit."""
        if self.tensor_parallel_size != 1:
            raise ConfigError(
                f"tensor_parallel_size: {self.tensor_parallel_size} is not supported, only 1 is",
                param="tensor_parallel_size",
            )
        if self.advertise_address in ("0.0.0.0", "::", ""):
            raise ConfigError(
                f"advertise_address: {self.advertise_address!r} is no address that others can reach",
                param="advertise_address",
            )
        if not self.model_dir.is_dir():
            raise ConfigError(f"model_dir: {self.model_dir} is not a directory", param="model_dir")
        RedisUrl.parse(self.redis_url)
        self.engine_config()

    def engine_config(self) -> EngineConfig:
        """The engine's part. Raises ConfigError for settings that contradict each other."""
        return EngineConfig(
            model_dir=self.model_dir,
            dtype=self.dtype,
            kv_cache_dtype=self.kv_cache_dtype,
            device=self.device,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            kv_cache_memory_bytes=self.kv_cache_memory_bytes,
            host_kv_cache_bytes=self.host_kv_cache_bytes,
            disk_kv_cache_bytes=self.disk_kv_cache_bytes,
            disk_kv_cache_dir=self.disk_kv_cache_dir,
            gpu_memory_utilization=self.gpu_memory_utilization,
            device_claim_dir=self.device_claim_dir,
            batch_invariant=self.batch_invariant,
            cuda_graphs=self.cuda_graphs,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            enable_prefix_caching=self.enable_prefix_caching,
            quantization=self.quantization,
            num_threads=self.num_threads,
            transfer_staging_bytes=self.transfer_staging_bytes,
            transfer_memory=self.transfer_memory,
            compute_share=self.compute_share,
            kernel_cache_dir=self.kernel_cache_dir,
        )
