"""Frequencies and attention factors against transformers' own functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.fakes.tiny_model import tiny_config
from weir.engine.layers.rotary_embedding import RotaryEmbedding, attention_factor, inverse_frequencies
from weir.engine.models.decoder_config import DecoderConfig

FACTORS = [1.0 + 0.3 * index for index in range(8)]
SETTINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "linear", "factor": 3.0, "partial_rotary_factor": 0.5},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 0.7},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 8, "beta_slow": 2},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 0.5},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False},
    {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 64},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 64},
    {"rope_type": "proportional", "factor": 2.0, "partial_rotary_factor": 0.5},
    {"rope_type": "longrope", "short_factor": FACTORS, "long_factor": FACTORS, "factor": 4.0}
    | {"original_max_position_embeddings": 64},
    {"rope_type": "longrope", "short_factor": FACTORS, "long_factor": FACTORS, "attention_factor": 1.5}
    | {"original_max_position_embeddings": 64},
]


def both(settings: dict[str, Any], theta: float = 700.0) -> tuple[Any, LlamaConfig]:
    """One setting read by us and by transformers."""
    fields = tiny_config(rope_parameters={"rope_theta": theta} | settings, max_position_embeddings=256)
    del fields["rope_theta"]
    reference = LlamaConfig(**{name: value for name, value in fields.items() if name != "model_type"})
    return DecoderConfig.from_hf(fields).rope, reference


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: settings["rope_type"])
@pytest.mark.parametrize("theta", [700.0, 1e6])
def test_frequencies_equal_those_of_transformers(settings: dict[str, Any], theta: float) -> None:
    rope, reference = both(settings, theta)
    expected, factor = ROPE_INIT_FUNCTIONS[settings["rope_type"]](reference)
    found = inverse_frequencies(rope, 32)
    torch.testing.assert_close(found, expected.expand_as(found), rtol=1e-6, atol=0)
    assert attention_factor(rope) == pytest.approx(factor)


@pytest.mark.parametrize("position", [0, 200, 255, 256, 300, 900])
def test_dynamic_frequencies_are_those_of_a_sequence_that_ends_there(position: int) -> None:
    rope, reference = both({"rope_type": "dynamic", "factor": 4.0})
    expected, factor = ROPE_INIT_FUNCTIONS["dynamic"](reference, seq_len=position + 1)
    torch.testing.assert_close(inverse_frequencies(rope, 1024)[position], expected, rtol=1e-5, atol=0)
    assert attention_factor(rope) == factor == 1.0


@pytest.mark.parametrize("position", [0, 63, 64, 200])
def test_longrope_changes_its_factors_at_the_original_context(position: int) -> None:
    settings = {"short_factor": FACTORS, "long_factor": FACTORS[::-1], "original_max_position_embeddings": 64}
    rope, reference = both({"rope_type": "longrope", "factor": 4.0} | settings)
    expected, _ = ROPE_INIT_FUNCTIONS["longrope"](reference, seq_len=position + 1)
    torch.testing.assert_close(inverse_frequencies(rope, 256)[position], expected, rtol=1e-6, atol=0)


def test_the_table_has_cosines_then_sines_of_each_position() -> None:
    rope, _ = both({"rope_type": "default"})
    rows = RotaryEmbedding(rope, 300, torch.device("cpu")).cos_sin[torch.tensor([7, 0, 299])]
    angles = torch.tensor([7.0, 0.0, 299.0])[:, None] * inverse_frequencies(rope, 300)
    assert rows.dtype == torch.float32
    torch.testing.assert_close(rows, torch.cat((angles.cos(), angles.sin()), dim=-1))


def test_the_table_is_a_function_of_the_position_alone() -> None:
    rope, _ = both({"rope_type": "dynamic", "factor": 4.0})
    positions = torch.arange(500)
    short, long = (RotaryEmbedding(rope, length, torch.device("cpu")).cos_sin[positions] for length in (500, 1000))
    assert torch.equal(short, long)
