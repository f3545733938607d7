from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from decode_service.config import DecodeConfig
from prefill_service.config import PrefillConfig
from weir.core.errors import ConfigError
from weir.runtime.config import describe_config, load_config


def load(cls: type, tmp_path: Path, *flags: str) -> PrefillConfig | DecodeConfig:
    return load_config(cls, ["--model-dir", str(tmp_path), *flags], prog="worker", environ={})


@pytest.mark.parametrize("cls", [PrefillConfig, DecodeConfig])
@pytest.mark.parametrize(
    ("flags", "param"),
    [
        (["--tensor-parallel-size", "2"], "tensor_parallel_size"),
        (["--advertise-address", "0.0.0.0"], "advertise_address"),
        (["--model-dir", "/no/such/directory"], "model_dir"),
        (["--redis-url", "http://127.0.0.1"], "redis_url"),
        (["--block-size", "0"], "block_size"),
        (["--max-num-seqs", "64", "--max-num-batched-tokens", "8"], "max_num_batched_tokens"),
        (["--device", "tpu"], "device"),
        (["--gpu-memory-utilization", "1.5"], "gpu_memory_utilization"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_name(cls: type, flags: list[str], param: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(cls, tmp_path, *flags)
    assert caught.value.param == param
    assert param in caught.value.message


@pytest.mark.parametrize("listen", ["127.0.0.1:9000", "unix://relative.sock", "http://x"])
def test_a_transfer_listener_has_a_scheme(listen: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="transfer_listen"):
        load(PrefillConfig, tmp_path, "--transfer-listen", listen)


def test_the_engine_gets_what_was_set(tmp_path: Path) -> None:
    config = load(
        DecodeConfig, tmp_path, "--block-size=32", "--kv-cache-memory-bytes=64MiB", "--no-enable-prefix-caching"
    )
    engine = config.engine_config()
    assert (engine.block_size, engine.kv_cache_memory_bytes, engine.enable_prefix_caching) == (32, 64 * 2**20, False)


def test_the_transfer_secret_is_never_described(tmp_path: Path) -> None:
    config = load(PrefillConfig, tmp_path, "--transfer-secret=wolf")
    assert "wolf" not in str(describe_config(config))


@pytest.mark.parametrize("module", ["prefill_service", "decode_service"])
def test_a_refused_setting_costs_no_torch(module: str, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        f"import {module}.__main__ as main\n"
        "from weir.runtime.config import load_config\n"
        "assert 'torch' not in sys.modules, 'torch is imported before the configuration is read'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
