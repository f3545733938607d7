"""What a step of a model does at least, against a count of its tensors."""

from __future__ import annotations

from math import prod

import pytest

from benchmarks.model_floor import ModelFloor
from benchmarks.random_model import LLAMA_3_8B, QWEN_3_30B_A3B, small_config
from tests.fakes.tiny_model import tensor_shapes
from weir.engine.models.decoder_config import DecoderConfig


def floor_of(config: dict[str, object]) -> ModelFloor:
    return ModelFloor(DecoderConfig.from_hf(config))


def matrices(config: dict[str, object]) -> int:
    """Elements that every step reads: all matrices but the embedding."""
    shapes = tensor_shapes(config)
    return sum(prod(shape) for name, shape in shapes.items() if len(shape) == 2 and "embed_tokens" not in name)


def test_a_decode_step_reads_all_matrices_and_the_context() -> None:
    config = small_config(LLAMA_3_8B)
    step = floor_of(config).decode(3, 100)
    kv_elements = 3 * 100 * 2 * 2 * 16 * 2  # of two heads of 16 in two layers, keys and values
    assert step.num_bytes == 2 * (matrices(config) + kv_elements)
    assert step.flops == 2 * 3 * matrices(config) + 4 * 3 * 100 * 4 * 16 * 2


def test_a_prompt_has_one_row_of_logits_and_sees_what_is_before_each_token() -> None:
    config = small_config(LLAMA_3_8B)
    head = 512 * 64
    step = floor_of(config).prefill(10)
    assert step.flops == 2 * (10 * (matrices(config) - head) + head) + 4 * 55 * 4 * 16 * 2
    assert step.num_bytes == 2 * (matrices(config) + 10 * 2 * 2 * 16 * 2)


def test_the_weights_of_eight_billion_are() -> None:
    assert floor_of(LLAMA_3_8B).decode(1, 0).num_bytes == pytest.approx(2 * (8.03e9 - 128256 * 4096), rel=1e-3)


def test_experts_are_met_as_often_as_even_routing_does() -> None:
    floor = floor_of(QWEN_3_30B_A3B)
    assert floor.num_experts_met(1) == pytest.approx(8)
    assert floor.num_experts_met(2) == pytest.approx(8 + 8 * 120 / 128)
    assert floor.num_experts_met(10_000) == pytest.approx(128)


def test_a_step_that_meets_all_experts_reads_all_matrices() -> None:
    config = small_config(QWEN_3_30B_A3B)
    assert floor_of(config).decode(1000, 0).num_bytes == 2 * matrices(config)


def test_a_token_multiplies_with_its_own_experts_only() -> None:
    config = small_config(QWEN_3_30B_A3B)  # two of four experts of 3 x 64 x 32, in two layers
    unused = 2 * 2 * 3 * 64 * 32
    assert floor_of(config).decode(1, 0).flops == 2 * (matrices(config) - unused)
