"""Everything a model needs but the numbers of its weights, read from whatever form it came in.

Two forms, a Hugging Face directory and a GGUF file, become the same four values and one tensor source, so that nothing
after this file asks which it was.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, processors

from weir.core.errors import ModelLoadError
from weir.engine.gguf_model import GgufCheckpoint
from weir.engine.gguf_parts import gguf_parts
from weir.engine.gguf_tokenizer import build_tokenizer, tokenizer_config
from weir.engine.quantized_checkpoint import unquantized
from weir.engine.safetensors_file import SafetensorsCheckpoint, check_index, checkpoint_files
from weir.engine.weights import TensorSource

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
_SLOW_VOCABULARIES = ("tokenizer.model", "vocab.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """One model, opened.

    Attributes:
        config: a Hugging Face config.json.
        tokenizer_config: special tokens as strings or None, `add_bos_token`, and `chat_template` where there is one.
        generation_config: a Hugging Face generation_config.json; may be empty.
        weight_format: "safetensors" or "gguf".
        weight_paths: the files behind `weights`, in order.
        end_token_ids: ids that end a sequence beside those the configurations name.
    """

    config: dict[str, Any]
    tokenizer: Tokenizer
    tokenizer_config: dict[str, Any]
    generation_config: dict[str, Any]
    weights: TensorSource
    weight_format: str
    weight_paths: tuple[Path, ...]
    end_token_ids: tuple[int, ...] = ()

    @classmethod
    def read(cls, path: Path) -> ModelFiles:
        """Open a Hugging Face directory or a GGUF file.

        Raises:
            ModelLoadError: a file is missing or damaged; names it.
        """
        return _read_directory(path) if path.is_dir() else _read_gguf(path)

    def token_id(self, name: str) -> int | None:
        """The id of a special token ("bos_token"), None where the model has none."""
        token = self.tokenizer_config.get(name)
        return None if token is None else self.tokenizer.token_to_id(token)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends a sequence, the generation configuration's first."""
        named = [
            self.generation_config.get("eos_token_id"),
            self.config.get("eos_token_id"),
            self.token_id("eos_token"),
        ]
        ids: list[int] = []
        for value in (*named, *self.end_token_ids):
            ids.extend(value if isinstance(value, list) else [value] if value is not None else [])
        return tuple(dict.fromkeys(ids))


def _read_gguf(path: Path) -> ModelFiles:
    checkpoint = GgufCheckpoint(path)
    metadata = checkpoint.metadata
    tokenizer = build_tokenizer(metadata, path)
    ids = {f"{name}_token_id": metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    ids["pad_token_id"] = metadata.get("tokenizer.ggml.padding_token_id")
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom")]
    return ModelFiles(
        config=checkpoint.hub_config(),
        tokenizer=tokenizer,
        tokenizer_config=tokenizer_config(metadata),
        generation_config={name: token_id for name, token_id in ids.items() if token_id is not None},
        weights=checkpoint,
        weight_format="gguf",
        weight_paths=tuple(gguf_parts(path)),
        end_token_ids=tuple(token_id for token_id in ends if token_id is not None),
    )


def _read_directory(path: Path) -> ModelFiles:
    config = _read_json(path / "config.json")
    if config is None:
        raise ModelLoadError(f"{path / 'config.json'}: missing; a model directory needs its config.json")
    weight_paths = checkpoint_files(path)
    checkpoint = SafetensorsCheckpoint(weight_paths)
    check_index(path, checkpoint)
    tokenizer = _read_tokenizer(path)
    settings = _read_tokenizer_config(path)
    _follow_bos_setting(tokenizer, settings)
    return ModelFiles(
        config=config,
        tokenizer=tokenizer,
        tokenizer_config=settings,
        generation_config=_read_json(path / "generation_config.json") or {},
        weights=unquantized(checkpoint, path),
        weight_format="safetensors",
        weight_paths=tuple(weight_paths),
    )


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        fields = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError as exc:
        raise ModelLoadError(f"{path}: not JSON: {exc}") from exc
    if not isinstance(fields, dict):
        raise ModelLoadError(f"{path}: not a JSON object")
    return fields


def _read_tokenizer(directory: Path) -> Tokenizer:
    path = directory / "tokenizer.json"
    if not path.exists() and any((directory / name).exists() for name in _SLOW_VOCABULARIES):
        return _convert_tokenizer(directory)
    if not path.exists():
        raise ModelLoadError(f"{path}: missing; a model directory needs its tokenizer")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as exc:  # the library raises plain Exception
        raise ModelLoadError(f"{path}: not a tokenizer: {exc}") from exc


def _convert_tokenizer(directory: Path) -> Tokenizer:
    """Older checkpoints have only a SentencePiece model or a vocabulary with merges; transformers knows them all."""
    from transformers import AutoTokenizer

    try:
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True).backend_tokenizer
    except Exception as exc:  # any converter may fail in its own way
        raise ModelLoadError(f"{directory}: no tokenizer.json, and its vocabulary cannot be converted: {exc}") from exc
    return tokenizer


def _read_tokenizer_config(directory: Path) -> dict[str, Any]:
    settings = _read_json(directory / "tokenizer_config.json") or {}
    for name, token in (_read_json(directory / "special_tokens_map.json") or {}).items():
        settings.setdefault(name, token)
    for name in SPECIAL_TOKENS:
        token = settings.get(name)
        settings[name] = token.get("content") if isinstance(token, Mapping) else token
    template_file = directory / "chat_template.jinja"
    template = template_file.read_text() if template_file.exists() else settings.pop("chat_template", None)
    if isinstance(template, list):
        by_name = {entry["name"]: entry["template"] for entry in template}
        template = by_name.get("default", next(iter(by_name.values()), None))
    if template is not None:
        settings["chat_template"] = template
    return settings


def _follow_bos_setting(tokenizer: Tokenizer, settings: dict[str, Any]) -> None:
    """Bring tokenizer.json and `add_bos_token` to agree: the setting wins, a missing one follows the tokenizer."""
    bos = settings.get("bos_token")
    bos_id = None if bos is None else tokenizer.token_to_id(bos)
    adds_bos = bos_id is not None and tokenizer.encode("a").ids[:1] == [bos_id]
    wanted = bool(settings.setdefault("add_bos_token", adds_bos)) and bos_id is not None
    settings["add_bos_token"] = wanted
    if wanted and not adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, bos_id)]
        )
    elif adds_bos and not wanted:
        tokenizer.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B:1", special_tokens=[])
