from __future__ import annotations

import pytest

from weir.core.errors import ConfigError
from weir.core.kv_layout import KvLayout
from weir.engine.kv_dtype import choose_kv_dtype


@pytest.mark.parametrize("capability", [None, (8, 0), (9, 0)])
def test_auto_is_the_default_and_others_are_what_they_say(capability: tuple[int, int] | None) -> None:
    assert choose_kv_dtype("auto", default="bfloat16", capability=capability) == "bfloat16"
    assert choose_kv_dtype("int8", default="bfloat16", capability=capability) == "int8"


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (12, 0)])
def test_fp8_is_e4m3_where_the_gpu_has_it(capability: tuple[int, int]) -> None:
    kv_dtype = choose_kv_dtype("fp8", default="bfloat16", capability=capability)
    layout = KvLayout(num_layers=1, num_kv_heads=2, head_dim=8, block_size=16, kv_dtype=kv_dtype)
    assert layout.block_bytes == 2 * 2 * 8 * 16


@pytest.mark.parametrize(("capability", "found"), [(None, "here is none"), ((8, 6), "this one has 8.6")])
def test_fp8_is_refused_elsewhere_by_name_and_with_what_is_possible(
    capability: tuple[int, int] | None, found: str
) -> None:
    with pytest.raises(ConfigError, match=f"kv_cache_dtype is 'fp8'.* 8.9 .*{found}.*int8") as caught:
        choose_kv_dtype("fp8", default="bfloat16", capability=capability)
    assert caught.value.param == "kv_cache_dtype"
