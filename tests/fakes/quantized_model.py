"""Tiny models whose matrices are stored as quantised checkpoints store them, each beside the same model in floats.

Codes are drawn at random and packed here number by number, as the formats are described, and not as Weir unpacks them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.fakes.tiny_model import write_tiny_model

SIZES = {"hidden_size": 64, "intermediate_size": 160}
GROUP = 32
E4M3 = torch.float8_e4m3fn
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A matrix as a checkpoint has it, by what the names end with, and what it stands for."""

    tensors: Tensors
    weight: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One kind of checkpoint: its `quantization_config`, and how it stores a matrix [num_outputs, num_inputs]."""

    config: dict[str, Any]
    store: Callable[[int, int], Stored]


def write_quantized_model(directory: Path, method: Method, **overrides: Any) -> tuple[Path, Path]:
    """The model as `method` stores it, and in floats: two Hugging Face directories."""
    plain = write_tiny_model(directory / "plain", **SIZES | overrides)
    quantized = write_tiny_model(directory / "quantized", **SIZES | overrides, quantization_config=method.config)
    torch.manual_seed(0)
    floats = load_file(plain / "model.safetensors")
    stored: Tensors = {}
    for name, tensor in floats.items():
        if not name.endswith("_proj.weight"):
            stored[name] = tensor
            continue
        matrix = method.store(*tensor.shape)
        stored |= {f"{name.removesuffix('weight')}{end}": each.contiguous() for end, each in matrix.tensors.items()}
        floats[name] = matrix.weight.contiguous()
    save_file(floats, plain / "model.safetensors")
    save_file(stored, quantized / "model.safetensors")
    return quantized, plain


def _words(codes: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """[n, m] to int32 [n, m * bits / 32]: place i of a word has the code `order[i]` of those that are in it."""
    count = 32 // bits
    words = torch.zeros(len(codes), codes.shape[1] // count, dtype=torch.int64)
    for place in range(count):
        words |= codes[:, (order or range(count))[place] :: count].long() << bits * place
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _drawn(num_outputs: int, num_inputs: int, bits: int, group: int, zero: int | None) -> tuple[torch.Tensor, ...]:
    """Codes, a scale and a zero for each input, and scales and zeros as [num_outputs, num_groups]."""
    num_groups = -(-num_inputs // group)
    codes = torch.randint(0, 1 << bits, (num_outputs, num_inputs))
    scales = (0.5 + torch.rand(num_outputs, num_groups)).mul(4 / (1 << bits) * num_inputs**-0.5).half()
    zeros = torch.randint(1, 17, scales.shape) if zero is None else torch.full(scales.shape, zero)
    return codes, scales, zeros


def _each(of_groups: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    return of_groups.float()[:, groups]


def gptq(bits: int = 4, group: int = GROUP, zero: int | None = None, *, is_v2: bool = False, order: str = "") -> Method:
    """`order`: "acts" mixes the inputs, the same for all matrices of a size; "own" differently for each."""

    def store(num_outputs: int, num_inputs: int) -> Stored:
        size = num_inputs if group == -1 else group
        codes, scales, zeros = _drawn(num_outputs, num_inputs, bits, size, zero)
        zeros = zeros.clamp_max(15) if is_v2 and bits == 4 else zeros
        groups = torch.arange(num_inputs) // size
        if order:
            generator = torch.Generator().manual_seed(num_inputs) if order == "acts" else None
            groups = groups[torch.randperm(num_inputs, generator=generator)]
        tensors = {
            "qweight": _words(codes, bits).t(),
            "qzeros": _words((zeros - (0 if is_v2 else 1)).t(), bits),
            "scales": scales.t(),
            "g_idx": groups.to(torch.int32),
        }
        return Stored(tensors=tensors, weight=(codes - _each(zeros, groups)) * _each(scales, groups))

    fields = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": zero is not None}
    return Method(config={**fields, "checkpoint_format": "gptq_v2" if is_v2 else "gptq"}, store=store)


def awq() -> Method:
    def store(num_outputs: int, num_inputs: int) -> Stored:
        codes, scales, zeros = _drawn(num_outputs, num_inputs, 4, GROUP, None)
        zeros = zeros.clamp_max(15)
        groups = torch.arange(num_inputs) // GROUP
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        tensors = {
            "qweight": _words(codes.t(), 4, order),
            "qzeros": _words(zeros.t(), 4, order),
            "scales": scales.t(),
        }
        return Stored(tensors=tensors, weight=(codes - _each(zeros, groups)) * _each(scales, groups))

    fields = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    return Method(config=fields, store=store)


def compressed(layout: str, bits: int, *, is_symmetric: bool = True, strategy: str = "group") -> Method:
    """compressed-tensors, of words of four or eight bits."""

    def store(num_outputs: int, num_inputs: int) -> Stored:
        group = GROUP if strategy == "group" else num_inputs
        codes, scales, zeros = _drawn(num_outputs, num_inputs, bits, group, 1 << bits - 1 if is_symmetric else None)
        zeros = zeros.clamp_max((1 << bits) - 1)
        groups = torch.arange(num_inputs) // group
        tensors = {"weight_scale": scales}
        if layout == "pack-quantized":
            tensors |= {"weight_packed": _words(codes, bits), "weight_shape": torch.tensor([num_outputs, num_inputs])}
        else:
            tensors |= {"weight": (codes - (1 << bits - 1)).to(torch.int8)}
        if not is_symmetric:
            tensors["weight_zero_point"] = _words(zeros.t(), bits).t()
        return Stored(tensors=tensors, weight=(codes - _each(zeros, groups)) * _each(scales, groups))

    weights = {"num_bits": bits, "type": "int", "symmetric": is_symmetric, "strategy": strategy, "group_size": GROUP}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    fields = {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups, "ignore": ["lm_head"]}
    return Method(config=fields, store=store)


def e4m3(method: str, strategy: str, scale: str = "weight_scale") -> Method:
    """Codes are floats of eight bits, with scales of the whole, of outputs, or of blocks of 128 by 128."""

    def store(num_outputs: int, num_inputs: int) -> Stored:
        codes = torch.randn(num_outputs, num_inputs).mul(100).to(E4M3)
        shape = {
            "tensor": (),
            "channel": (num_outputs, 1),
            "block": (-(-num_outputs // 128), -(-num_inputs // 128)),
        }[strategy]
        scales = (0.5 + torch.rand(shape)) * 0.01 * num_inputs**-0.5
        each = scales
        if strategy == "block":
            each = scales.repeat_interleave(128, 0)[:num_outputs].repeat_interleave(128, 1)[:, :num_inputs]
        tensors = {"weight": codes, scale: scales}
        if strategy == "tensor":
            tensors["input_scale"] = torch.tensor(0.1)
        return Stored(tensors=tensors, weight=codes.float() * each)

    fields: dict[str, Any] = {"quant_method": method, "activation_scheme": "dynamic"}
    if method == "fp8" and strategy == "block":
        fields["weight_block_size"] = [128, 128]
    if method == "compressed-tensors":
        blocks = {"block_structure": [128, 128]} if strategy == "block" else {}
        weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, **blocks}
        acts = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}
        fields |= {"format": "float-quantized"}
        fields |= {"config_groups": {"group_0": {"weights": weights, "input_activations": acts}}}
    return Method(config=fields, store=store)


METHODS: dict[str, Method] = {
    "gptq": gptq(),
    "gptq, symmetric": gptq(zero=8),
    "gptq, zeros as they are": gptq(is_v2=True),
    "gptq, whole rows": gptq(group=-1),
    "gptq, eight bits": gptq(bits=8, zero=128),
    "gptq, inputs by their activations": gptq(order="acts"),
    "awq": awq(),
    "compressed, four bits": compressed("pack-quantized", 4),
    "compressed, four bits with zeros": compressed("pack-quantized", 4, is_symmetric=False),
    "compressed, eight bits in words": compressed("pack-quantized", 8, strategy="channel"),
    "compressed, int8": compressed("int-quantized", 8, strategy="channel"),
    "compressed, int8 in groups": compressed("int-quantized", 8),
    "compressed, fp8": e4m3("compressed-tensors", "channel"),
    "compressed, fp8 blocks": e4m3("compressed-tensors", "block"),
    "fp8": e4m3("fp8", "tensor"),
    "fp8 blocks": e4m3("fp8", "block", "weight_scale_inv"),
    "fbgemm_fp8": e4m3("fbgemm_fp8", "channel"),
}
