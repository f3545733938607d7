"""A checkpoint of a quantised model: its matrices under their plain names, as floats for who wants those, or as their
codes. What `quantization_config` may say is checked here and nowhere else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kernels.cpu.packed_matrix import RowSource
from kernels.quantized_matrix import QuantizedRows
from weir.core.errors import ModelLoadError
from weir.engine.safetensors_file import TensorSpec
from weir.engine.weight_packings import AwqPacking, BytePacking, CompressedPacking, GptqPacking, Packing
from weir.engine.weights import TensorSource

METHODS = ("gptq", "awq", "compressed-tensors", "fp8", "fbgemm_fp8")


class QuantizedCheckpoint:
    """A `weights.TensorSource` whose matrices are `base.weight`, however `packing` stores them in `source`.

    Attributes:
        packing: of its quantised matrices; others are as they are.
    """

    def __init__(self, source: TensorSource, packing: Packing) -> None:
        self.packing = packing
        self._source = source
        self._specs = dict(source.specs)
        self._bases: dict[str, str] = {}
        for name, spec in source.specs.items():
            base, _, end = name.rpartition(".")
            if end != packing.main or spec.dtype not in packing.main_dtypes:
                continue
            for other in (packing.main, *packing.others):
                self._specs.pop(f"{base}.{other}", None)
            weight = f"{base}.weight"
            self._bases[weight] = base
            self._specs[weight] = TensorSpec(name=weight, dtype=torch.float32, shape=packing.shape(spec.shape))

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        return self._specs

    def location(self, name: str) -> str:
        base = self._bases.get(name)
        return self._source.location(name if base is None else f"{base}.{self.packing.main}")

    def read(self, name: str) -> torch.Tensor:
        quantized = self.quantized(name)
        return self._source.read(name) if quantized is None else quantized.dequantized()

    def rows(self, name: str) -> RowSource:
        if name not in self._bases:
            return self._source.rows(name)
        return RowSource.of_floats(self.read(name), is_quantized=True)

    def quantized(self, name: str, device: torch.device | None = None) -> QuantizedRows | None:
        """The matrix `name` in codes, unpacked on `device`, the CPU by default; None where it is not quantised.

        Raises:
            ModelLoadError: one of its tensors is missing, or says what is not supported; names the matrix and the file.
        """
        base = self._bases.get(name)
        if base is None:
            return None
        names = frozenset(other for other in self.packing.others if f"{base}.{other}" in self._source.specs)

        def read(end: str) -> torch.Tensor:
            if f"{base}.{end}" not in self._source.specs:
                raise ModelLoadError(f"tensor {base}.{end} is missing")
            return self._source.read(f"{base}.{end}").to(device or "cpu")

        try:
            rows = self.packing.rows(read, names)
            _check_sizes(rows, self._specs[name].shape)
            return rows
        except (ModelLoadError, RuntimeError) as exc:
            message = exc.message if isinstance(exc, ModelLoadError) else f"its tensors do not fit together: {exc}"
            raise ModelLoadError(f"{self.location(name)}: matrix {name}: {message}") from exc


def _check_sizes(rows: QuantizedRows, shape: tuple[int, ...]) -> None:
    num_outputs, num_inputs = shape
    needed = (num_outputs, -(-num_inputs // rows.group_size))
    for name, tensor in (("scales", rows.scales), ("zeros", rows.zeros)):
        if tensor is not None and tensor.shape != needed:
            raise ModelLoadError(
                f"{name} are for {list(tensor.shape)} outputs and groups, the matrix has {list(needed)}"
            )


def unquantized(source: TensorSource, model_dir: Path) -> TensorSource:
    """`source` with plain names, whether `config.json` in `model_dir` says that it is quantised or not.

    Raises:
        ModelLoadError: it is in a way that is not supported; names the file, the field and its value.
    """
    path = model_dir / "config.json"
    fields = json.loads(path.read_text()).get("quantization_config")
    if not fields:
        return source
    try:
        return QuantizedCheckpoint(source, packing_of(fields))
    except ModelLoadError as exc:
        raise ModelLoadError(f"{path}: {exc.message}") from exc
    except (KeyError, TypeError, AttributeError) as exc:
        raise ModelLoadError(f"{path}: quantization_config: a field is missing or impossible: {exc!r}") from exc


def packing_of(fields: Mapping[str, Any]) -> Packing:
    """How a checkpoint with this `quantization_config` stores its matrices.

    Raises:
        ModelLoadError: not in a way that is supported; names the field and its value.
    """
    method = _one_of(fields, "quant_method", METHODS)
    if method == "gptq":
        return _gptq(fields)
    if method == "awq":
        _one_of(fields, "bits", (4,))
        _one_of(fields, "version", ("gemm", "GEMM", None))
        _one_of(fields, "zero_point", (True,))
        return AwqPacking(group_size=_group_size(fields))
    if method == "compressed-tensors":
        return _compressed(fields)
    blocks = fields.get("weight_block_size")
    if blocks not in (None, [128, 128]):
        raise _refused("weight_block_size", blocks, "128 by 128")
    scale = "weight_scale_inv" if blocks else "weight_scale"
    return BytePacking(scale=scale, group_size=None, has_blocks=blocks is not None, quantizes_rows=True)


def _gptq(fields: Mapping[str, Any]) -> Packing:
    if fields.get("dynamic"):
        raise _refused("dynamic", fields["dynamic"], "one way for all matrices")
    bits: int = _one_of(fields, "bits", (4, 8))
    layout = _one_of(fields, "checkpoint_format", ("gptq", "gptq_v2", None))
    return GptqPacking(bits=bits, group_size=_group_size(fields), is_v2=layout == "gptq_v2")


def _compressed(fields: Mapping[str, Any]) -> Packing:
    layout = _one_of(fields, "format", ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"))
    for name in ("kv_cache_scheme", "transform_config"):
        if fields.get(name):
            raise _refused(name, fields[name], "none")
    _one_of(fields.get("sparsity_config") or {}, "format", ("dense", None))
    groups = list(dict(fields.get("config_groups") or {}).values())
    if not groups or any(group["weights"] != groups[0]["weights"] for group in groups):
        raise _refused("config_groups", fields.get("config_groups"), "one way for all matrices")
    weights, activations = groups[0]["weights"], groups[0].get("input_activations")
    bits: int = _one_of(weights, "num_bits", (4, 8) if layout == "pack-quantized" else (8,))
    kind = _one_of(weights, "type", ("int",) if layout in ("pack-quantized", "int-quantized") else ("int", "float"))
    strategy = _one_of(weights, "strategy", ("tensor", "channel", "group", "block"))
    group_size = _group_size(weights) if strategy == "group" else None
    if layout == "pack-quantized":
        return CompressedPacking(bits=bits, group_size=group_size)
    if strategy == "block" and list(weights.get("block_structure") or ()) != [128, 128]:
        raise _refused("block_structure", weights.get("block_structure"), "128 by 128")
    if kind == "int" and not weights.get("symmetric", True):
        raise _refused("symmetric", False, "True where a code has eight bits")
    return BytePacking(
        scale="weight_scale",
        group_size=group_size,
        has_blocks=strategy == "block",
        quantizes_rows=kind == "float" and activations is not None,
    )


def _group_size(fields: Mapping[str, Any]) -> int | None:
    size = fields.get("group_size")
    if size in (None, -1):
        return None
    if not isinstance(size, int) or size < 1 or size % 32:
        raise _refused("group_size", size, "-1 and multiples of 32")
    return size


def _one_of(fields: Mapping[str, Any], name: str, allowed: tuple[Any, ...]) -> Any:
    value = fields.get(name)
    if value not in allowed:
        raise _refused(name, value, ", ".join(str(each) for each in allowed if each is not None))
    return value


def _refused(name: str, value: object, supported: str) -> ModelLoadError:
    return ModelLoadError(f"quantization_config: {name} {value!r} is not supported; supported: {supported}")
