"""EngineConfig: refuses by field, value and limit."""

from __future__ import annotations

import pytest

from tests.fakes.model_runner import make_config
from weir.core.errors import ConfigError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "float8"),
        ("kv_cache_dtype", "int4"),
        ("device", "tpu"),
        ("block_size", 0),
        ("num_blocks", 0),
        ("kv_cache_memory_bytes", -1),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 7),
        ("max_model_len", 0),
        ("num_threads", 0),
        ("gpu_memory_utilization", 0.0),
        ("gpu_memory_utilization", 1.5),
        ("host_kv_cache_bytes", -1),
        ("host_kv_cache_bytes", 1.5),
        ("disk_kv_cache_bytes", -1),
    ],
)
def test_values_out_of_range_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config(**{field: value})
    assert caught.value.param == field
    assert field in caught.value.message
    assert str(value) in caught.value.message


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("host_kv_cache_bytes", {"host_kv_cache_bytes": 4096, "enable_prefix_caching": False}),
        ("disk_kv_cache_bytes", {"disk_kv_cache_bytes": 4096}),
        ("disk_kv_cache_dir", {"host_kv_cache_bytes": 4096, "disk_kv_cache_bytes": 4096}),
    ],
)
def test_tiers_that_cannot_work_are_refused_by_name(field: str, settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config(**settings)
    assert caught.value.param == field
    assert "4096" in caught.value.message


def test_token_budget_is_never_below_the_number_of_sequences() -> None:
    assert make_config(max_num_batched_tokens=None, max_num_seqs=64).token_budget() == 256
    assert make_config(max_num_batched_tokens=None, max_num_seqs=1000).token_budget() == 1000
    assert make_config(max_num_batched_tokens=500).token_budget() == 500
