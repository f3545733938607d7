"""A whole model over a cache of float8, in plain torch, with the scales of its checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fakes.tiny_model import write_tiny_model
from tests.kernels.paged_pool import rms_ratio
from weir.core.errors import ModelLoadError
from weir.core.kv_layout import KvLayout
from weir.engine.batch import Batch, BatchArrays, ScheduledSequence
from weir.engine.models.decoder import Decoder
from weir.engine.models.decoder_config import DecoderConfig
from weir.engine.open_weights import open_weights
from weir.engine.paged_kv_cache import PagedKvCache
from weir.engine.prepare import prepare
from weir.engine.weights import Weights

CPU = torch.device("cpu")
TOKENS = tuple(range(5, 45))
NAMES = ("{0}.{1}_scale", "{0}.{1}_proj.{1}_scale", "{0}.{1}_proj.output_scale")
Scales = dict[str, torch.Tensor]


def with_small_keys_and_large_values(directory: Path, scales: Scales) -> Path:
    """The tiny model with keys that float8 rounds to zero and values that it cuts off, and everything else equal to
    that, prepared; `scales` are more tensors of its checkpoint."""
    source = write_tiny_model(directory / "source")
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        factor = {"q_proj": 1e5, "k_proj": 1e-5, "v_proj": 1e4, "o_proj": 1e-4}.get(name.split(".")[-2], 1.0)
        tensors[name] = tensor * factor
    save_file(tensors | scales, source / "model.safetensors")
    return prepare(str(source), output=directory / "prepared")


def logits(model_dir: Path, kv_dtype: str) -> torch.Tensor:
    """Of the last tokens, of which all but one are a prompt and one is decoded."""
    config = DecoderConfig.load(model_dir)
    decoder = Decoder(config, Weights(open_weights(model_dir), torch.float32, CPU), 64, CPU)
    layout = KvLayout(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=16,
        kv_dtype=kv_dtype,
    )
    cache = PagedKvCache(layout, 4, CPU)
    found = []
    for start, end in ((0, 39), (39, 40)):
        chunk = ScheduledSequence(
            sequence_id="a", token_ids=TOKENS[start:end], start=start, block_ids=(3, 0, 2), num_logits=1
        )
        output = decoder(Batch.on_host(BatchArrays.from_scheduled([chunk], 16)), cache)
        assert isinstance(output, torch.Tensor)
        found.append(output)
    return torch.cat(found)


def scales_named(pattern: str, keys: torch.Tensor, values: torch.Tensor) -> Scales:
    layers = [f"model.layers.{index}.self_attn" for index in range(2)]
    return {
        pattern.format(layer, part): scale.clone() for layer in layers for part, scale in (("k", keys), ("v", values))
    }


@pytest.mark.parametrize("pattern", NAMES)
def test_with_the_scales_of_the_checkpoint_a_model_computes_what_it_does_over_float32(
    tmp_path: Path, pattern: str
) -> None:
    scales = scales_named(pattern, torch.tensor(1e-5), torch.tensor([1e2, 1e3]))
    model_dir = with_small_keys_and_large_values(tmp_path, scales)
    assert rms_ratio(logits(model_dir, "float8_e4m3fn"), logits(model_dir, "float32")) < 0.1


def test_without_scales_they_are_one(tmp_path: Path) -> None:
    plain = with_small_keys_and_large_values(tmp_path / "plain", {})
    ones = with_small_keys_and_large_values(tmp_path / "ones", scales_named(NAMES[0], torch.ones(1), torch.ones(2)))
    assert rms_ratio(logits(plain, "float8_e4m3fn"), logits(ones, "float8_e4m3fn")) < 1e-5
    assert rms_ratio(logits(plain, "float8_e4m3fn"), logits(plain, "float32")) > 0.5


@pytest.mark.parametrize(("scale", "named"), [(torch.ones(3), r"shape \[3\]"), (torch.zeros(1), "not above 0")])
def test_scales_that_cannot_be_are_refused_by_name(tmp_path: Path, scale: torch.Tensor, named: str) -> None:
    with pytest.raises(ModelLoadError, match=f"model.layers.0.self_attn.k_scale .*{named}"):
        logits(with_small_keys_and_large_values(tmp_path, scales_named(NAMES[0], scale, torch.ones(1))), "float32")
