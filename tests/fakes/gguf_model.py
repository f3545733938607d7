"""Tiny models as GGUF files, written by the `gguf` package as llama.cpp's converter does it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from tests.fakes.tiny_model import CHAT_TEMPLATE, random_tensors, tiny_config, write_tokenizer

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GLOBAL_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_tiny_gguf(
    path: Path,
    family: str = "llama",
    *,
    quantization: str = "F32",
    fields: dict[str, Any] | None = None,
    extra_tensors: dict[str, np.ndarray] | None = None,
    split_max_tensors: int = 0,
    **overrides: Any,
) -> dict[str, Any]:
    """Write a random model and give back its config.json; `fields` are further metadata, name to value.

    Matrices are packed as `quantization`, vectors as F32.
    """
    config = tiny_config(family, **overrides)
    writer = gguf.GGUFWriter(path, family, split_max_tensors=split_max_tensors)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    _add_tokenizer(writer, path.parent)
    for key, value in (fields or {}).items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32, bool: writer.add_bool}
        add[type(value)](key, value)
    kind = gguf.GGMLQuantizationType[quantization]
    for name, tensor in random_tensors(config).items():
        if family == "llama" and ".q_proj" in name:
            tensor = interleave(tensor, heads)
        if family == "llama" and ".k_proj" in name:
            tensor = interleave(tensor, kv_heads)
        data = tensor.numpy()
        used = kind if data.ndim == 2 else gguf.GGMLQuantizationType.F32
        packed = gguf.quantize(data, used) if used != gguf.GGMLQuantizationType.F16 else data.astype(np.float16)
        writer.add_tensor(_stored_name(name), packed, raw_dtype=used)
    for name, data in (extra_tensors or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return config


def interleave(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """llama.cpp's `permute`: the two halves of each head's rows, one row of each in turn."""
    halves = tensor.reshape(num_heads, 2, tensor.shape[0] // num_heads // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape).contiguous()


def _add_tokenizer(writer: gguf.GGUFWriter, scratch: Path) -> None:
    write_tokenizer(scratch)
    fields = json.loads((scratch / "tokenizer.json").read_text())
    (scratch / "tokenizer.json").unlink()
    (scratch / "tokenizer_config.json").unlink()
    vocabulary: dict[str, int] = fields["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    num_special = len(fields["added_tokens"])
    normal, control = int(gguf.TokenType.NORMAL), int(gguf.TokenType.CONTROL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([control if index < num_special else normal for index in range(len(tokens))])
    writer.add_token_merges([" ".join(merge) for merge in fields["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _stored_name(name: str) -> str:
    stem, suffix = name.rsplit(".", 1)
    if stem in _GLOBAL_NAMES:
        return f"{_GLOBAL_NAMES[stem]}.{suffix}"
    _, _, layer, inner = stem.split(".", 3)
    return f"blk.{layer}.{_LAYER_NAMES[inner]}.{suffix}"
