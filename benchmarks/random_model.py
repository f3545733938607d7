"""Models of real shapes with random weights, written and prepared where no checkpoint is at hand.

The weights are drawn on the device that will use them, some layers a file, and several files at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.fakes.tiny_model import SPECIAL_TOKENS, random_tensor, tensor_shapes
from weir.engine.prepare import prepare

FILE_BYTES = 2 << 30
NUM_WRITERS = 4
_COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}
LLAMA_3_8B: dict[str, Any] = _COMMON | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
QWEN_3_30B_A3B: dict[str, Any] = _COMMON | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_hidden_layers": 12,  # of 48: all of them are 61 GB, and a step takes each the same time
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
}


def small_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same model for a dry run."""
    sizes = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
    }
    experts = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
    return {**config, **sizes, **{name: size for name, size in experts.items() if name in config}}


def prepared_random_model(name: str, config: Mapping[str, Any], directory: Path, device: torch.device) -> Path:
    """A prepared directory below `directory`; what was made there before is found again."""
    source = directory / name
    if not (source / "tokenizer_config.json").exists():
        write_random_model(source, config, device)
    return prepare(str(source), name=name, output=directory / f"{name}-prepared")


def write_random_model(directory: Path, config: Mapping[str, Any], device: torch.device) -> None:
    """A Hugging Face directory with weights in bfloat16."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": config["eos_token_id"]}))
    parts = list(_parts(tensor_shapes(config)))

    def write(number: int) -> None:
        generator = torch.Generator(device).manual_seed(number)
        drawn = {
            name: random_tensor(name, shape, generator).to(torch.bfloat16).cpu()
            for name, shape in parts[number].items()
        }
        save_file(drawn, directory / file_name(number), metadata={"format": "pt"})

    def file_name(number: int) -> str:
        return f"model-{number + 1:05}-of-{len(parts):05}.safetensors"

    with ThreadPoolExecutor(NUM_WRITERS) as writers:
        list(writers.map(write, range(len(parts))))
    weight_map = {name: file_name(number) for number, part in enumerate(parts) for name in part}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    write_tokenizer(directory, config["vocab_size"])


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """A byte a token, and enough tokens of text that every id of the model can be told to a client."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    spelled = (*SPECIAL_TOKENS, *alphabet)
    words = (f"Ġt{number}" for number in range(vocab_size - len(spelled)))
    vocabulary = {token: number for number, token in enumerate((*spelled, *words))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": SPECIAL_TOKENS[1], "eos_token": SPECIAL_TOKENS[2], "add_bos_token": False}
    (directory / "tokenizer_config.json").write_text(
        json.dumps({**settings, "tokenizer_class": "PreTrainedTokenizerFast"})
    )


def _parts(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[dict[str, tuple[int, ...]]]:
    """As many tensors as fill a file."""
    part: dict[str, tuple[int, ...]] = {}
    num_bytes = 0
    for name, shape in shapes.items():
        part[name] = shape
        num_bytes += torch.Size(shape).numel() * torch.bfloat16.itemsize
        if num_bytes >= FILE_BYTES:
            yield part
            part, num_bytes = {}, 0
    if part:
        yield part
