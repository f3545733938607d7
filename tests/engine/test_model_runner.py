from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.reference_model import Conversation
from weir.core.errors import ConfigError
from weir.engine.batch import ScheduledSequence
from weir.engine.config import EngineConfig
from weir.engine.model_runner import DEFAULT_KV_CACHE_BYTES, ModelRunner

MakeModel = Callable[..., Path]
CPU = torch.device("cpu")
TOKENS = [5 + index * 7 % 300 for index in range(40)]


def one(token_ids: list[int], block_ids: list[int], num_logits: int) -> list[ScheduledSequence]:
    item = ScheduledSequence(
        sequence_id="a", token_ids=tuple(token_ids), start=0, block_ids=block_ids, num_logits=num_logits
    )
    return [item]


def test_only_wanted_rows_get_logits(make_tiny_model: MakeModel) -> None:
    runner = ModelRunner(EngineConfig(model_dir=make_tiny_model(), num_blocks=128))
    every = runner.execute(one(TOKENS, [4, 9, 2], 40))
    assert every.shape == (40, 384)
    assert every.dtype == torch.float32
    assert every.is_contiguous()
    assert not every.requires_grad
    torch.testing.assert_close(runner.execute(one(TOKENS, [0, 1, 3], 1)), every[-1:], rtol=1e-4, atol=1e-4)
    assert runner.execute(one(TOKENS, [0, 1, 3], 0)).shape == (0, 384)


def test_blocks_of_others_are_neither_read_nor_written(make_tiny_model: MakeModel) -> None:
    runner = ModelRunner(EngineConfig(model_dir=make_tiny_model(), num_blocks=128))
    clean = runner.execute(one(TOKENS, [4, 9, 2], 40))
    runner.cache.tensor.fill_(float("nan"))
    poisoned = runner.execute(one(TOKENS, [4, 9, 2], 40))
    assert torch.equal(poisoned, clean)
    last = ScheduledSequence(sequence_id="a", token_ids=(7,), start=40, block_ids=[4, 9, 2], num_logits=1)
    assert runner.execute([last]).isfinite().all()
    others = [block for block in range(128) if block not in (4, 9, 2)]
    assert runner.cache.tensor[others].isnan().all()
    assert runner.cache.tensor[2, ..., 9:, :].isnan().all()
    assert runner.cache.tensor[[4, 9]].isfinite().all()


def test_warming_up_leaves_no_trace(make_tiny_model: MakeModel) -> None:
    runner = ModelRunner(EngineConfig(model_dir=make_tiny_model(), num_blocks=128))
    runner.warm_up()
    assert not runner.cache.tensor.any()


def test_neighbours_do_not_change_a_sequence(make_tiny_model: MakeModel) -> None:
    runner = ModelRunner(EngineConfig(model_dir=make_tiny_model(), num_blocks=128))
    alone = Conversation(runner, [TOKENS]).finish(40)[0]
    crowd = Conversation(runner, [TOKENS[:30], TOKENS, TOKENS[5:9]], seed=3)
    crowd.step(12, 0, 0)
    crowd.step(1, 25, 1)
    torch.testing.assert_close(crowd.finish(1)[1], alone, rtol=1e-4, atol=1e-4)


def test_num_blocks_wins_over_memory(make_tiny_model: MakeModel) -> None:
    runner = ModelRunner(EngineConfig(model_dir=make_tiny_model(), num_blocks=200, kv_cache_memory_bytes=1))
    assert runner.num_blocks == 200
    assert runner.cache.tensor.shape == (200, 2, 2, 2, 16, 16)
    assert runner.max_model_len == 2048


def test_memory_is_turned_into_whole_blocks(make_tiny_model: MakeModel) -> None:
    config = EngineConfig(model_dir=make_tiny_model(), kv_cache_memory_bytes=5_000_000, dtype="bfloat16")
    runner = ModelRunner(config)
    assert runner.layout.block_bytes == 2 * 2 * 2 * 16 * 16 * 2
    assert runner.num_blocks == 5_000_000 // runner.layout.block_bytes


def test_the_default_pool_is_bounded_by_what_is_free(tiny_model_dir: Path) -> None:
    config = EngineConfig(model_dir=tiny_model_dir)
    small = ModelRunner(config, free_memory=lambda: 6_000_000)
    assert small.num_blocks == 3_000_000 // small.layout.block_bytes
    large = ModelRunner(config, free_memory=lambda: 1 << 40)
    assert large.num_blocks == DEFAULT_KV_CACHE_BYTES // large.layout.block_bytes


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_blocks": 127}, r"num_blocks .* 127 blocks .* max_model_len 2048 needs 128"),
        ({"kv_cache_memory_bytes": 1000}, r"kv_cache_memory_bytes .* 0 blocks"),
        ({"max_model_len": 2049}, r"max_model_len is 2049; tiny has positions for 2048"),
        ({"device": "cpu", "kv_cache_dtype": "fp8"}, r"kv_cache_dtype is 'fp8'; .* int8 are possible"),
    ],
)
def test_settings_that_cannot_be_met_are_refused_by_name(
    tiny_model_dir: Path, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        ModelRunner(EngineConfig(model_dir=tiny_model_dir, **options))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_blocks": 2**31 - 1}, "num_blocks gives a KV pool of 2147483647 blocks, .* bytes; .* are free"),
        ({"kv_cache_memory_bytes": 2**50}, "kv_cache_memory_bytes gives a KV pool of .* blocks, .*; .* are free"),
        (
            {"num_blocks": 512, "max_num_batched_tokens": 2**36},
            "max_num_batched_tokens is 68719476736; a step of so many",
        ),
    ],
)
def test_more_memory_than_the_host_has_is_refused_by_name(
    tiny_model_dir: Path, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        ModelRunner(EngineConfig(model_dir=tiny_model_dir, device="cpu", **options))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there_is_refused_by_name(tiny_model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="device is 'cuda'"):
        ModelRunner(EngineConfig(model_dir=tiny_model_dir, device="cuda"))


def test_batch_invariance_is_refused_where_it_cannot_be_had(tiny_model_dir: Path) -> None:
    ModelRunner(EngineConfig(model_dir=tiny_model_dir, num_blocks=128, batch_invariant=True))
    with pytest.raises(ConfigError, match="it needs the CPU kernels") as caught:
        ModelRunner(EngineConfig(model_dir=tiny_model_dir, num_blocks=128, batch_invariant=True, kernel_cache_dir=None))
    assert caught.value.param == "batch_invariant"


def test_a_shorter_context_needs_fewer_blocks(tiny_model_dir: Path) -> None:
    runner = ModelRunner(EngineConfig(model_dir=tiny_model_dir, num_blocks=4, max_model_len=64))
    assert runner.max_model_len == 64


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cuda_equals_the_cpu(tiny_model_dir: Path, dtype: str) -> None:
    item = ScheduledSequence(
        sequence_id="a", token_ids=tuple(TOKENS), start=0, block_ids=[4, 9, 2], num_logits=len(TOKENS)
    )
    expected = ModelRunner(EngineConfig(model_dir=tiny_model_dir, device="cpu", num_blocks=128)).execute([item])
    runner = ModelRunner(EngineConfig(model_dir=tiny_model_dir, device="cuda", dtype=dtype))
    logits = runner.execute([item]).cpu()
    tolerance = 1e-4 if dtype == "float32" else 0.05
    assert (logits - expected).abs().max() <= tolerance * expected.abs().max()
