"""What a GGUF file means as a model of the Llama family: its config.json, and its tensors under Hugging Face names.

llama.cpp stores queries and keys of architecture "llama" with the rows of each head interleaved; they are put back
here, keys by their own head count. "qwen2" and "qwen3" are stored as they are.

Source: llama.cpp, convert_hf_to_gguf.py (`LlamaModel.permute`) and gguf-py's tensor names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kernels.cpu.packed_matrix import RowSource
from weir.core.errors import ModelLoadError
from weir.engine.gguf_file import GgufParts
from weir.engine.gguf_parts import gguf_parts
from weir.engine.safetensors_file import TensorSpec

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)$")
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")


class GgufCheckpoint:
    """A GGUF model's tensors as one `weights.TensorSource`, under Hugging Face names and in their row order.

    Raises:
        ModelLoadError: the file cannot be read, its architecture is not of this family, or a tensor has no meaning.
    """

    def __init__(self, path: Path) -> None:
        self.parts = GgufParts(gguf_parts(path))
        self.metadata = self.parts.metadata
        self.architecture = str(self.metadata.get("general.architecture"))
        if self.architecture not in ARCHITECTURES:
            supported = ", ".join(ARCHITECTURES)
            raise ModelLoadError(f"{path}: architecture {self.architecture!r} is not supported; supported: {supported}")
        self._path = path
        self._stored_names: dict[str, str] = {}
        for stored in self.parts.tensors:
            if stored not in _ROPE_FACTORS:
                self._stored_names[self._hub_name(stored)] = stored
        self._interleaved_heads: dict[str, int] = {}
        if self.architecture == "llama":
            num_heads = int(self._get("attention.head_count"))
            num_kv_heads = int(self._get("attention.head_count_kv", num_heads))
            self._interleaved_heads = {"attn_q": num_heads, "attn_k": num_kv_heads}

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        tensors = self.parts.tensors
        return {
            name: TensorSpec(name=name, dtype=tensors[stored].dtype, shape=tensors[stored].shape)
            for name, stored in self._stored_names.items()
        }

    def location(self, name: str) -> str:
        return self.parts.location(self._stored_names[name])

    def read(self, name: str) -> torch.Tensor:
        stored = self._stored_names[name]
        return self._in_order(stored, self.parts.read(stored))

    def rows(self, name: str) -> RowSource:
        stored = self._stored_names[name]
        rows = self.parts.rows(stored)
        return replace(rows, data=self._in_order(stored, rows.data))

    def _in_order(self, stored: str, tensor: torch.Tensor) -> torch.Tensor:
        match = _LAYER.match(stored)
        num_heads = self._interleaved_heads.get(match[2]) if match else None
        return tensor if num_heads is None else _deinterleave(tensor, num_heads)

    def hub_config(self) -> dict[str, Any]:
        """The config.json that transformers would have for this model."""
        num_heads = int(self._get("attention.head_count"))
        hidden_size = int(self._get("embedding_length"))
        embedding = self.parts.tensors.get("token_embd.weight")
        if embedding is None:
            raise ModelLoadError(f"{self._path}: tensor token_embd.weight is missing")
        window = self._get("attention.sliding_window", None)
        rotary_dim = self._get("rope.dimension_count", None)
        head_dim = self._get("attention.key_length", None)
        if head_dim is None:
            head_dim = rotary_dim if self.architecture == "llama" and rotary_dim else hidden_size // num_heads
        model_type = "mistral" if self.architecture == "llama" and window else self.architecture
        class_name = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[model_type]
        token_ids = {name: self.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
        config: dict[str, Any] = {
            "architectures": [f"{class_name}ForCausalLM"],
            "model_type": model_type,
            "vocab_size": embedding.shape[0],
            "hidden_size": hidden_size,
            "intermediate_size": int(self._get("feed_forward_length")),
            "num_hidden_layers": int(self._get("block_count")),
            "num_attention_heads": num_heads,
            "num_key_value_heads": int(self._get("attention.head_count_kv", num_heads)),
            "head_dim": int(head_dim),
            "hidden_act": "silu",
            "max_position_embeddings": int(self._get("context_length")),
            "rms_norm_eps": float(self._get("attention.layer_norm_rms_epsilon")),
            "tie_word_embeddings": "output.weight" not in self.parts.tensors,
            "rope_parameters": self._rope_parameters(int(head_dim)),
            "bos_token_id": token_ids["bos"],
            "eos_token_id": token_ids["eos"],
            "dtype": "float32" if embedding.dtype == torch.float32 else str(embedding.dtype).removeprefix("torch."),
        }
        if model_type == "mistral":
            config["sliding_window"] = int(window)
        elif model_type != "qwen2":
            config["attention_bias"] = "blk.0.attn_q.bias" in self.parts.tensors
        return config

    def _rope_parameters(self, head_dim: int) -> dict[str, Any]:
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(self._get("rope.freq_base", 10_000.0))}
        rotary_dim = self._get("rope.dimension_count", None)
        if rotary_dim is not None and int(rotary_dim) != head_dim:
            rope["partial_rotary_factor"] = int(rotary_dim) / head_dim
        context = int(self._get("rope.scaling.original_context_length", self._get("context_length")))
        scaling = str(self._get("rope.scaling.type", "none"))
        factor = self._get("rope.scaling.factor", self._get("rope.scale_linear", None))
        factors = {name: self._rope_factors(name) for name in _ROPE_FACTORS if name in self.parts.tensors}
        if "rope_freqs.weight" in factors:
            # Llama 3.1's scaling, already worked out into one divisor a pair: longrope with one set for every length.
            rope |= {"rope_type": "longrope", "attention_factor": 1.0, "original_max_position_embeddings": context}
            rope["short_factor"] = rope["long_factor"] = factors["rope_freqs.weight"]
        elif len(factors) == 2:
            rope |= {"rope_type": "longrope", "original_max_position_embeddings": context}
            rope |= {"short_factor": factors[_ROPE_FACTORS[1]], "long_factor": factors[_ROPE_FACTORS[2]]}
            attention_factor = self._get("rope.scaling.attn_factor", None)
            if attention_factor is not None:
                rope["attention_factor"] = float(attention_factor)
        elif scaling == "linear" or (scaling == "none" and factor is not None and float(factor) != 1.0):
            rope |= {"rope_type": "linear", "factor": float(factor)}
        elif scaling == "yarn":
            rope |= {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": context}
        elif scaling != "none":
            raise ModelLoadError(f"{self._path}: rope scaling {scaling!r} is not supported")
        return rope

    def _rope_factors(self, name: str) -> list[float]:
        return [float(factor) for factor in self.parts.read(name).float()]

    def _get(self, key: str, *default: Any) -> Any:
        value = self.metadata.get(f"{self.architecture}.{key}", *default)
        if value is None and not default:
            raise ModelLoadError(f"{self._path}: metadata has no {self.architecture}.{key}")
        return value

    def _hub_name(self, stored: str) -> str:
        if stored in _GLOBAL_NAMES:
            return _GLOBAL_NAMES[stored]
        match = _LAYER.match(stored)
        if match is None or match[2] not in _LAYER_NAMES:
            raise ModelLoadError(f"{self._path}: tensor {stored} has no place in a {self.architecture} model")
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"


def _deinterleave(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo llama.cpp's interleaving of each head's rows: [rows] or [rows, size] of q or k."""
    split = tensor.view(num_heads, tensor.shape[0] // num_heads // 2, 2, *tensor.shape[1:])
    return split.transpose(1, 2).reshape(tensor.shape)
