"""Every family and RoPE scaling against transformers, on tiny random models, batched with strangers and chunked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.reference_model import (
    MAX_RELATIVE_DIFFERENCE,
    Conversation,
    largest_difference,
    load_reference,
    reference_logits,
    stepwise_reference_logits,
)
from tests.fakes.tiny_model import tiny_config, write_tiny_model
from weir.core.errors import ModelLoadError
from weir.engine.config import EngineConfig
from weir.engine.model_runner import ModelRunner
from weir.engine.models.decoder_config import DecoderConfig
from weir.engine.prepare import prepare

FACTORS = [1.0 + 0.1 * index for index in range(8)]
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with a tied head": ("llama", {"tie_word_embeddings": True}),
    "llama with every bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama without grouping": ("llama", {"num_key_value_heads": 4}),
    "llama with wide heads": ("llama", {"head_dim": 40}),
    "mistral with a window": ("mistral", {"sliding_window": 9}),
    "mistral without a window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 with windows in its last layer": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3 with a tied head and biases": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
}
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {}),
    "mixtral with a window and one expert a token": ("mixtral", {"sliding_window": 9, "num_experts_per_tok": 1}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe with weights as they are": ("qwen3_moe", {"norm_topk_prob": False}),
    "qwen3_moe with a dense layer between": ("qwen3_moe", {"num_hidden_layers": 3, "mlp_only_layers": [1]}),
    "qwen3_moe with experts in every second layer": ("qwen3_moe", {"num_hidden_layers": 4, "decoder_sparse_step": 2}),
    "qwen3_moe with biases, a window, all experts": (
        "qwen3_moe",
        {"attention_bias": True, "use_sliding_window": True, "sliding_window": 9, "num_experts_per_tok": 7},
    ),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen2_moe without biases, renormalised": ("qwen2_moe", {"qkv_bias": False, "norm_topk_prob": True}),
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 500.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 500.0},
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "short_factor": FACTORS,
        "long_factor": FACTORS[::-1],
        "original_max_position_embeddings": 32,
        "rope_theta": 500.0,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 500.0,
    },
}
LENGTHS = (50, 1, 17, 33)


def load(
    tmp_path: Path, family: str, block_size: int = 16, kernels: str = "compiled", **overrides: Any
) -> tuple[ModelRunner, Any]:
    """One random model on both sides, ours computed by the compiled kernels or by torch alone."""
    source = write_tiny_model(tmp_path / "hub", family, **overrides)
    model_dir = prepare(str(source), output=tmp_path / "prepared")
    config = EngineConfig(model_dir=model_dir, block_size=block_size, kv_cache_memory_bytes=64 << 20)
    runner = ModelRunner(config if kernels == "compiled" else replace(config, kernel_cache_dir=None))
    return runner, load_reference(source)


def sequences(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 384, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize("kernels", ["compiled", "torch"])
@pytest.mark.parametrize("name", FAMILIES)
def test_family_equals_transformers(tmp_path: Path, name: str, kernels: str) -> None:
    family, overrides = FAMILIES[name]
    runner, reference = load(tmp_path, family, kernels=kernels, **overrides)
    whole = Conversation(runner, sequences()).finish(64)
    chunked = Conversation(runner, sequences(), seed=1)
    chunked.step(20, 0, 3, 0)
    chunked.step(1, 1, 1, 32)
    for index, token_ids in enumerate(sequences()):
        expected = reference_logits(reference, token_ids)
        assert largest_difference(whole[index], expected) <= MAX_RELATIVE_DIFFERENCE
        assert largest_difference(chunked.finish(7)[index], expected) <= MAX_RELATIVE_DIFFERENCE


@pytest.mark.parametrize("name", MIXTURES)
def test_mixture_of_experts_equals_transformers(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    family, overrides = MIXTURES[name]
    runner, reference = load(tmp_path, family, **overrides)
    assert "they have no experts" in caplog.text
    whole = Conversation(runner, sequences()).finish(64)
    chunked = Conversation(runner, sequences(), seed=1)
    chunked.step(20, 0, 3, 0)
    chunked.step(1, 1, 1, 32)
    for index, token_ids in enumerate(sequences()):
        expected = reference_logits(reference, token_ids)
        for found in (whole[index], chunked.finish(7)[index]):
            assert largest_difference(found, expected) <= MAX_RELATIVE_DIFFERENCE
            assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("rope", ROPES)
def test_rope_scaling_equals_transformers_within_the_trained_context(tmp_path: Path, rope: str) -> None:
    runner, reference = load(tmp_path, "llama", rope_parameters=ROPES[rope], max_position_embeddings=128)
    token_ids = sequences((32,))[0]
    logits = Conversation(runner, [token_ids]).finish(32)[0]
    assert largest_difference(logits, reference_logits(reference, token_ids)) <= MAX_RELATIVE_DIFFERENCE


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("chunk", [1, 64])
def test_rope_scaling_equals_transformers_decoding_beyond_it(tmp_path: Path, rope: str, chunk: int) -> None:
    runner, reference = load(tmp_path, "llama", rope_parameters=ROPES[rope], max_position_embeddings=48)
    token_ids = sequences((48 if ROPES[rope]["rope_type"] in ("default", "llama3", "longrope") else 80,))[0]
    logits = Conversation(runner, [token_ids]).finish(chunk)[0]
    expected = stepwise_reference_logits(reference, token_ids)
    assert largest_difference(logits, expected) <= MAX_RELATIVE_DIFFERENCE


@pytest.mark.parametrize("kernels", ["compiled", "torch"])
@pytest.mark.parametrize("block_size", [1, 8, 32, 64, 256])
def test_block_size_changes_nothing(tmp_path: Path, block_size: int, kernels: str) -> None:
    runner, reference = load(tmp_path, "llama", block_size, kernels)
    conversation = Conversation(runner, sequences())
    conversation.step(31, 1, 0, 2)
    for token_ids, logits in zip(sequences(), conversation.finish(11), strict=True):
        assert largest_difference(logits, reference_logits(reference, token_ids)) <= MAX_RELATIVE_DIFFERENCE


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.05), ("float16", 0.01)])
def test_half_precision_stays_near(tmp_path: Path, dtype: str, tolerance: float) -> None:
    source = write_tiny_model(tmp_path / "hub")
    model_dir = prepare(str(source), output=tmp_path / "prepared")
    runner = ModelRunner(EngineConfig(model_dir=model_dir, dtype=dtype, kv_cache_memory_bytes=64 << 20))
    assert runner.layout.kv_dtype == dtype
    token_ids = sequences((40,))[0]
    logits = Conversation(runner, [token_ids]).finish(16)[0]
    reference = reference_logits(load_reference(source), token_ids)
    assert logits.dtype == torch.float32
    assert largest_difference(logits, reference) < tolerance


def test_old_and_new_spelling_of_rope_settings_mean_the_same() -> None:
    fields = tiny_config(max_position_embeddings=64)
    del fields["rope_theta"]
    old = DecoderConfig.from_hf(fields | {"rope_theta": 77.0, "rope_scaling": {"type": "linear", "factor": 2.0}})
    new = {"rope_type": "linear", "factor": 2.0, "rope_theta": 77.0}
    assert old == DecoderConfig.from_hf(fields | {"rope_parameters": new})
    assert old.max_model_len == 128


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"hidden_size": None}, "impossible"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"head_dim": 15}, "head_dim 15"),
        ({"rope_scaling": {"rope_type": "unheard-of"}}, "unheard-of"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "'factor'"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1], "long_factor": [1]}}, "8 factors"),
    ],
)
def test_a_model_that_is_not_supported_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelLoadError, match=named):
        DecoderConfig.from_hf(tiny_config() | change)


@pytest.mark.parametrize(
    ("family", "change", "named"),
    [
        ("mixtral", {"num_experts_per_tok": 6}, "num_experts_per_tok is 6 of 5 experts"),
        ("qwen3_moe", {"num_experts_per_tok": 0}, "num_experts_per_tok is 0"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ("qwen3_moe", {"hidden_act": "gelu"}, "gelu"),
        ("qwen2_moe", {"use_sliding_window": True}, "use_sliding_window"),
    ],
)
def test_a_mixture_that_is_not_supported_is_refused_by_name(family: str, change: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelLoadError, match=named):
        DecoderConfig.from_hf(tiny_config(family) | change)


@pytest.mark.parametrize("change", [{"num_experts": 0}, {"mlp_only_layers": [0, 1]}, {"decoder_sparse_step": 3}])
def test_a_mixture_whose_layers_are_all_dense_has_no_experts(change: dict[str, Any]) -> None:
    assert DecoderConfig.from_hf(tiny_config("qwen3_moe") | change).experts is None


def test_mixtral_has_its_own_defaults() -> None:
    fields = tiny_config("mixtral")
    for name in ("rope_theta", "rms_norm_eps", "max_position_embeddings", "num_key_value_heads"):
        del fields[name]
    config = DecoderConfig.from_hf(fields | {"num_attention_heads": 16})
    assert (config.rope.theta, config.rms_norm_eps) == (1_000_000.0, 1e-5)
    assert (config.max_model_len, config.num_kv_heads) == (131072, 8)
    assert config.sliding_windows == (None, None)


def test_a_missing_field_is_named() -> None:
    config = tiny_config()
    del config["num_hidden_layers"]
    with pytest.raises(ModelLoadError, match="num_hidden_layers"):
        DecoderConfig.from_hf(config)
