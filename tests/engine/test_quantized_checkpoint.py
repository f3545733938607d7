"""Checkpoints of quantised models, each kind: the logits are those of the same model in floats."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.linear import AnyMatrix
from kernels.quantized_matrix import CodeFormat, QuantizedMatrix
from tests.fakes.quantized_model import METHODS, gptq, write_quantized_model
from tests.fakes.reference_model import (
    MAX_RELATIVE_DIFFERENCE,
    Conversation,
    largest_difference,
    load_reference,
    reference_logits,
)
from tests.fakes.tiny_model import prepare_tiny_model, write_tiny_model
from weir.core.errors import ModelLoadError
from weir.core.kv_layout import KvLayout
from weir.engine.batch import Batch, BatchArrays, ScheduledSequence
from weir.engine.config import EngineConfig
from weir.engine.model_runner import ModelRunner
from weir.engine.models.decoder import Decoder
from weir.engine.models.decoder_config import DecoderConfig
from weir.engine.open_weights import open_weights
from weir.engine.paged_kv_cache import PagedKvCache
from weir.engine.prepare import prepare
from weir.engine.quantized_checkpoint import packing_of
from weir.engine.quantized_weights import QuantizedWeights
from weir.engine.weights import TakenTensor, Weights

CPU = torch.device("cpu")
TOKENS = tuple(5 + index * 7 % 300 for index in range(20))


def logits_of(model_dir: Path, quantization: str) -> tuple[torch.Tensor, dict[str, AnyMatrix]]:
    """What a model computes with matrices as they are on a GPU, and those matrices."""
    config, source = DecoderConfig.load(model_dir), open_weights(model_dir)
    matrices: dict[str, AnyMatrix] = {}
    packed = QuantizedWeights(source, quantization, torch.float32, CPU)

    def kept(taken: TakenTensor) -> AnyMatrix:
        matrices[taken.name] = packed(taken)
        return matrices[taken.name]

    model = Decoder(config, Weights(source, torch.float32, CPU, kept), 64, CPU)
    layout = KvLayout(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=16,
        kv_dtype="float32",
    )
    item = ScheduledSequence(sequence_id="a", token_ids=TOKENS, start=0, block_ids=[1, 0], num_logits=len(TOKENS))
    with torch.inference_mode():
        logits = model(Batch.on_host(BatchArrays.from_scheduled([item], 16)), PagedKvCache(layout, 2, CPU))
    assert isinstance(logits, torch.Tensor)
    return logits, matrices


@pytest.mark.parametrize("name", METHODS)
def test_a_quantised_checkpoint_computes_what_its_weights_stand_for(tmp_path: Path, name: str) -> None:
    quantized, plain = write_quantized_model(tmp_path, METHODS[name])
    model_dir = prepare(str(quantized), output=tmp_path / "prepared")
    expected = reference_logits(load_reference(plain), list(TOKENS))

    logits, matrices = logits_of(model_dir, "auto")
    floats, plain_matrices = logits_of(model_dir, "none")

    assert largest_difference(logits, expected) <= MAX_RELATIVE_DIFFERENCE
    assert largest_difference(floats, expected) <= MAX_RELATIVE_DIFFERENCE
    kept = {name for name, matrix in matrices.items() if isinstance(matrix, QuantizedMatrix)}
    assert kept == {name for name in matrices if "proj" in name}
    assert not any(isinstance(matrix, QuantizedMatrix) for matrix in plain_matrices.values())


@pytest.mark.parametrize("kernels", ["compiled", "torch"])
@pytest.mark.parametrize("name", ["gptq", "awq", "fp8 blocks"])
def test_a_cpu_computes_with_the_same_weights_in_floats(tmp_path: Path, name: str, kernels: str) -> None:
    quantized, plain = write_quantized_model(tmp_path, METHODS[name])
    options: dict[str, Any] = {} if kernels == "compiled" else {"kernel_cache_dir": None}
    model_dir = prepare(str(quantized), output=tmp_path / "prepared")
    runner = ModelRunner(EngineConfig(model_dir=model_dir, num_blocks=128, **options))
    logits = Conversation(runner, [list(TOKENS)]).finish(16)[0]
    assert largest_difference(logits, reference_logits(load_reference(plain), list(TOKENS))) <= MAX_RELATIVE_DIFFERENCE


def test_projections_whose_inputs_are_in_other_orders_are_floats(tmp_path: Path) -> None:
    quantized, plain = write_quantized_model(tmp_path, gptq(order="own"))
    logits, matrices = logits_of(prepare(str(quantized), output=tmp_path / "prepared"), "auto")
    expected = reference_logits(load_reference(plain), list(TOKENS))
    assert largest_difference(logits, expected) <= MAX_RELATIVE_DIFFERENCE
    assert isinstance(matrices["model.layers.0.self_attn.qkv_proj.weight"], torch.Tensor)
    assert isinstance(matrices["model.layers.0.self_attn.o_proj.weight"], QuantizedMatrix)


@pytest.mark.parametrize(("quantization", "tolerance"), [("int8", 0.03), ("int4", 0.4)])
@pytest.mark.parametrize("is_tied", [False, True])
def test_floats_are_quantised_where_that_is_asked_for(
    tmp_path: Path, quantization: str, tolerance: float, is_tied: bool
) -> None:
    model_dir = prepare_tiny_model(tmp_path, tie_word_embeddings=is_tied)
    expected, _ = logits_of(model_dir, "none")
    logits, matrices = logits_of(model_dir, quantization)
    formats = {name: matrix.format for name, matrix in matrices.items() if isinstance(matrix, QuantizedMatrix)}
    assert formats.keys() == matrices.keys()
    assert {formats[name] for name in formats if "layers" in name} == {CodeFormat(quantization)}
    assert {formats[name] for name in formats if "layers" not in name} == {CodeFormat.INT8}
    difference = (logits - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert 0 < difference < tolerance


def test_only_checkpoints_made_for_it_have_their_rows_rounded(tmp_path: Path) -> None:
    for index, (name, is_made_for_it) in enumerate({"fp8 blocks": True, "gptq": False}.items()):
        quantized, _ = write_quantized_model(tmp_path / str(index), METHODS[name])
        model_dir = prepare(str(quantized), output=tmp_path / str(index) / "prepared")
        matrix = logits_of(model_dir, "auto")[1]["model.layers.0.mlp.down_proj.weight"]
        assert isinstance(matrix, QuantizedMatrix)
        assert matrix.quantizes_rows == is_made_for_it


REFUSED: dict[str, tuple[str, Callable[[dict[str, Any]], object], str]] = {
    "method": ("gptq", lambda f: f.update(quant_method="bitsandbytes"), "quant_method 'bitsandbytes'"),
    "bits": ("gptq", lambda f: f.update(bits=3), "bits 3"),
    "group size": ("gptq", lambda f: f.update(group_size=48), "group_size 48"),
    "layout": ("gptq", lambda f: f.update(checkpoint_format="marlin"), "checkpoint_format 'marlin'"),
    "modules of their own": ("gptq", lambda f: f.update(dynamic={"-:lm_head": {}}), "dynamic"),
    "awq version": ("awq", lambda f: f.update(version="gemv"), "version 'gemv'"),
    "awq without zeros": ("awq", lambda f: f.update(zero_point=False), "zero_point False"),
    "blocks": ("fp8 blocks", lambda f: f.update(weight_block_size=[64, 64]), r"weight_block_size \[64, 64\]"),
    "compressed layout": ("compressed, int8", lambda f: f.update(format="marlin-24"), "format 'marlin-24'"),
    "kv cache": ("compressed, int8", lambda f: f.update(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
    "two ways": (
        "compressed, int8",
        lambda f: f["config_groups"].update(other={"weights": {"num_bits": 4}}),
        "config_groups",
    ),
    "no ways": ("compressed, int8", lambda f: f.update(config_groups={}), "config_groups"),
    "strategy": (
        "compressed, int8",
        lambda f: f["config_groups"]["group_0"]["weights"].update(strategy="tensor_group"),
        "strategy 'tensor_group'",
    ),
    "int8 with zeros": (
        "compressed, int8",
        lambda f: f["config_groups"]["group_0"]["weights"].update(symmetric=False),
        "symmetric False",
    ),
    "sparse": ("compressed, int8", lambda f: f.update(sparsity_config={"format": "sparse-24"}), "format 'sparse-24'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_field_and_value(name: str) -> None:
    method, change, named = REFUSED[name]
    fields = json.loads(json.dumps(METHODS[method].config))
    change(fields)
    with pytest.raises(ModelLoadError, match=f"quantization_config: {named}"):
        packing_of(fields)


@pytest.mark.parametrize(
    "fields", [{"quant_method": "hqq"}, {"quant_method": "compressed-tensors", "config_groups": 1}]
)
def test_a_model_that_is_quantised_otherwise_is_refused_when_it_is_prepared(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    source = write_tiny_model(tmp_path / "hub", quantization_config=fields)
    with pytest.raises(ModelLoadError, match=r"config\.json: quantization_config: "):
        prepare(str(source), output=tmp_path / "prepared")


BROKEN: dict[str, tuple[str, Callable[[dict[str, torch.Tensor]], object], str]] = {
    "no zeros": ("gptq", lambda t: t.pop(f"{O_PROJ}.qzeros"), "o_proj.qzeros is missing"),
    "groups of another size": (
        "gptq",
        lambda t: t.update({f"{O_PROJ}.g_idx": torch.zeros(64, dtype=torch.int32)}),
        r"matrix model\.layers\.1\.self_attn\.o_proj\.weight: g_idx does not give each group its 32 inputs",
    ),
    "zeros of eight bits": (
        "gptq, eight bits",
        lambda t: t.update({f"{O_PROJ}.qzeros": torch.zeros_like(t[f"{O_PROJ}.qzeros"])}),
        "zero points of eight bits",
    ),
    "too few scales": (
        "awq",
        lambda t: t.update({f"{O_PROJ}.scales": torch.ones(1, 64, dtype=torch.float16)}),
        r"o_proj\.weight: scales are for \[64, 1\] outputs and groups, the matrix has \[64, 2\]",
    ),
    "another shape": (
        "awq",
        lambda t: t.update({f"{O_PROJ}.qweight": torch.zeros(32, 8, dtype=torch.int32)}),
        r"o_proj\.weight has shape \[64, 32\], the model needs \[64, 64\]",
    ),
}
O_PROJ = "model.layers.1.self_attn.o_proj"


@pytest.mark.parametrize("name", BROKEN)
def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path: Path, name: str) -> None:
    method, change, named = BROKEN[name]
    quantized, _ = write_quantized_model(tmp_path, METHODS[method])
    tensors = load_file(quantized / "model.safetensors")
    change(tensors)
    save_file(tensors, quantized / "model.safetensors")
    with pytest.raises(ModelLoadError, match=named):
        logits_of(prepare(str(quantized), output=tmp_path / "prepared"), "auto")
