"""A small random model of each family as a Hugging Face directory, and prepared: tens of milliseconds, no network.

Weights are drawn wide enough that logits are far apart, so greedy tokens have no ties.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from weir.engine.prepare import prepare

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CLASSES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "mixtral": "Mixtral",
    "qwen2_moe": "Qwen2Moe",
    "qwen3_moe": "Qwen3Moe",
}
_EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 6, "num_experts_per_tok": 3, "shared_expert_intermediate_size": 56},
    "qwen3_moe": {"num_experts": 7, "num_experts_per_tok": 3, "norm_topk_prob": True},
}
_CORPUS = (
    "the quick brown fox jumps over the lazy dog and then the dog jumps over the fox; hello world, how are you today?"
)


def tiny_config(family: str = "llama", **overrides: Any) -> dict[str, Any]:
    """A config.json; `overrides` replace its fields."""
    config: dict[str, Any] = {
        "architectures": [f"{_CLASSES[family]}ForCausalLM"],
        "model_type": family,
        "vocab_size": 384,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "float32",
    }
    if family == "mistral":
        config["sliding_window"] = 24
    if family in ("qwen2_moe", "qwen3_moe"):
        config["moe_intermediate_size"] = 40
    return config | _EXPERTS.get(family, {}) | overrides


def write_tiny_model(
    directory: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    num_shards: int = 1,
    **overrides: Any,
) -> Path:
    """Write a random model as a Hugging Face directory: config, safetensors in `num_shards` files, tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    config = tiny_config(family, **overrides)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    write_tokenizer(directory)
    tensors = {name: tensor.to(dtype) for name, tensor in random_tensors(config, seed).items()}
    if num_shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return directory
    weight_map: dict[str, str] = {}
    names = list(tensors)
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = {name: tensors[name] for name in names[shard::num_shards]}
        save_file(part, directory / file)
        weight_map |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def prepare_tiny_model(directory: Path, family: str = "llama", *, name: str = "tiny", **options: Any) -> Path:
    """Write a random model and prepare it: the directory for `EngineConfig.model_dir`."""
    source = write_tiny_model(directory / "source", family, **options)
    return prepare(str(source), name=name, output=directory / "prepared")


def random_tensors(config: Mapping[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Every tensor of the model that `config` describes, under Hugging Face names, float32."""
    generator = torch.Generator().manual_seed(seed)
    return {name: random_tensor(name, shape, generator) for name, shape in tensor_shapes(config).items()}


def random_tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """A tensor of that name, float32, on the generator's device."""
    drawn = torch.randn(shape, generator=generator, device=generator.device)
    if name.endswith("norm.weight"):
        return drawn.mul_(0.1).add_(1)
    if name.endswith(".bias"):
        return drawn.mul_(0.1)
    return drawn if "embed_tokens" in name else drawn.mul_(1.5).mul_(shape[1] ** -0.5)


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of the model that `config` describes, under Hugging Face names."""
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    family = config["model_type"]
    has_bias = family == "qwen2" or (family == "qwen2_moe" and config.get("qkv_bias", True))
    has_bias = has_bias or config.get("attention_bias", False)
    shapes: dict[str, tuple[int, ...]] = {}

    def norm(name: str, size: int) -> None:
        shapes[f"{name}.weight"] = (size,)

    def linear(name: str, rows: int, columns: int, bias: bool = False) -> None:
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)

    def feed_forward(name: str, size: int, parts: Sequence[str] = ("gate_proj", "up_proj", "down_proj")) -> None:
        for part, rows, columns in zip(parts, (size, size, hidden), (hidden, hidden, size), strict=True):
            linear(f"{name}.{part}", rows, columns, config.get("mlp_bias", False))

    def sparse(name: str) -> None:
        is_mixtral = family == "mixtral"
        num_experts = config["num_local_experts" if is_mixtral else "num_experts"]
        linear(f"{name}.gate", num_experts, hidden)
        for expert in range(num_experts):
            if is_mixtral:
                feed_forward(f"{name}.experts.{expert}", inner, ("w1", "w3", "w2"))
            else:
                feed_forward(f"{name}.experts.{expert}", config["moe_intermediate_size"])
        if family == "qwen2_moe":
            feed_forward(f"{name}.shared_expert", config["shared_expert_intermediate_size"])
            linear(f"{name}.shared_expert_gate", 1, hidden)

    shapes["model.embed_tokens.weight"] = (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        norm(f"{name}.input_layernorm", hidden)
        linear(f"{name}.self_attn.q_proj", queries, hidden, has_bias)
        linear(f"{name}.self_attn.k_proj", keys, hidden, has_bias)
        linear(f"{name}.self_attn.v_proj", keys, hidden, has_bias)
        linear(f"{name}.self_attn.o_proj", hidden, queries, has_bias and not family.startswith("qwen2"))
        if family in ("qwen3", "qwen3_moe"):
            norm(f"{name}.self_attn.q_norm", head_dim)
            norm(f"{name}.self_attn.k_norm", head_dim)
        norm(f"{name}.post_attention_layernorm", hidden)
        if layer in _sparse_layers(config):
            sparse(f"{name}.block_sparse_moe" if family == "mixtral" else f"{name}.mlp")
        else:
            feed_forward(f"{name}.mlp", inner)
    norm("model.norm", hidden)
    if not config["tie_word_embeddings"]:
        linear("lm_head", config["vocab_size"], hidden)
    return shapes


def _sparse_layers(config: Mapping[str, Any]) -> set[int]:
    """Which layers have experts."""
    if config["model_type"] not in _EXPERTS:
        return set()
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers", [])
    return {layer for layer in range(config["num_hidden_layers"]) if (layer + 1) % step == 0 and layer not in dense}


def write_tokenizer(directory: Path) -> None:
    """Write a byte-level BPE tokenizer of at most 384 ids, with a chat template."""
    (directory / "tokenizer.json").write_text(_tokenizer_json())
    bos, eos = SPECIAL_TOKENS[1:]
    settings = {"bos_token": bos, "eos_token": eos, "pad_token": eos, "unk_token": None, "add_bos_token": False}
    settings |= {"chat_template": CHAT_TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared tiny Llama, made once for all tests; read-only."""
    return prepare_tiny_model(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture
def make_tiny_model(tmp_path: Path) -> Callable[..., Path]:
    """Prepares tiny models with options of `prepare_tiny_model`, each call into a directory of its own."""
    made: list[Path] = []

    def make(family: str = "llama", **options: Any) -> Path:
        made.append(prepare_tiny_model(tmp_path / f"model-{len(made)}", family, **options))
        return made[-1]

    return make


@cache
def _tokenizer_json() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_CORPUS], trainer)
    text: str = tokenizer.to_str()
    return text
