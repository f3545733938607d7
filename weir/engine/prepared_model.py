"""What a prepared model directory is made of: checks a model as a whole, then writes the files that services read."""

from __future__ import annotations

import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from weir.core.errors import ModelLoadError
from weir.core.model_card import CARD_FILE, ModelCard
from weir.engine.model_files import ModelFiles
from weir.engine.model_source import Progress
from weir.engine.models.decoder import Decoder
from weir.engine.models.decoder_config import DecoderConfig
from weir.engine.weight_manifest import MANIFEST_FILE, WeightFile, WeightManifest
from weir.engine.weights import Weights

MAX_COPIED_BYTES = 4 << 30
"""GGUF files of more together stay where they are."""


def write_prepared(
    path: Path,
    staged: Path,
    name: str,
    *,
    progress: Progress = lambda line: None,
    max_copied_bytes: float = MAX_COPIED_BYTES,
) -> None:
    """Write every file of a prepared directory.

    Args:
        path: a Hugging Face directory or a GGUF file.
        staged: the directory to fill; exists and is empty.
        name: what clients call the model.
        progress: told in one line what is going on.
        max_copied_bytes: GGUF files of more together are pointed at and not copied.

    Raises:
        ModelLoadError: the model is broken; names the file or the tensor.
    """
    progress(f"checking {path}")
    files = ModelFiles.read(path)
    config = DecoderConfig.from_hf(files.config)
    meta = torch.device("meta")
    weights = Weights(files.weights, torch.float32, meta)
    Decoder(config, weights, 1, meta)
    _check_vocabulary(files, config, path)
    files.tokenizer.save(str(staged / "tokenizer.json"))
    _write_json(staged / "config.json", files.config)
    _write_json(staged / "tokenizer_config.json", files.tokenizer_config)
    _write_json(staged / "generation_config.json", files.generation_config)
    progress(f"hashing {len(files.weight_paths)} weight files")
    with ThreadPoolExecutor() as pool:  # hashing lets other threads run
        source_files = tuple(pool.map(WeightFile.measure, files.weight_paths))
    manifest = WeightManifest(
        format=files.weight_format,
        directory=str(files.weight_paths[0].parent.resolve()),
        files=source_files,
        source_files=source_files,
    )
    if files.weight_format == "gguf" and sum(file.size_bytes for file in source_files) <= max_copied_bytes:
        for file in files.weight_paths:
            shutil.copyfile(file, staged / file.name)
        manifest = replace(manifest, directory=".")
    (staged / MANIFEST_FILE).write_text(manifest.to_json())
    bos_token_id = files.token_id("bos_token")
    card = ModelCard(
        name=name,
        architecture=str((files.config.get("architectures") or [config.model_type])[0]),
        max_model_len=config.max_model_len,
        vocab_size=config.vocab_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        hidden_size=config.hidden_size,
        num_parameters=weights.num_parameters,
        eos_token_ids=files.eos_token_ids,
        bos_token_id=bos_token_id,
        add_bos_token=bool(files.tokenizer_config["add_bos_token"]),
        weights_hash=manifest.content_hash(config.to_json()),
        created_s=int(time.time()),
    )
    (staged / CARD_FILE).write_text(card.to_json())


def _check_vocabulary(files: ModelFiles, config: DecoderConfig, path: Path) -> None:
    largest = max(files.tokenizer.get_vocab().values(), default=0)
    if largest >= config.vocab_size:
        raise ModelLoadError(
            f"{path}: the tokenizer has id {largest}, the model's vocabulary ends at {config.vocab_size}"
        )
    if not files.eos_token_ids:
        raise ModelLoadError(
            f"{path}: neither generation_config.json, config.json nor the tokenizer names an eos token"
        )


def _write_json(path: Path, fields: dict[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2, ensure_ascii=False))
