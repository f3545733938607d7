"""Where the weights of a prepared directory are, and what their files were when it was prepared.

Reads no weights, so that a process can tell without torch whether a model is ready.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from weir.core.errors import ModelLoadError

MANIFEST_FILE = "weir_weights.json"
_HASH_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFile:
    """One file as it was when the model was prepared; `sha256` is of its content."""

    name: str
    size_bytes: int
    sha256: str

    @classmethod
    def measure(cls, path: Path) -> WeightFile:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(_HASH_CHUNK_BYTES):
                digest.update(chunk)
        return cls(name=path.name, size_bytes=path.stat().st_size, sha256=digest.hexdigest())


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightManifest:
    """Where the weights of a prepared directory are.

    Attributes:
        format: "safetensors" or "gguf".
        directory: of the files; relative to the manifest's own directory, or absolute.
        files: all of them, in order.
        source_files: the files that the user gave; `files` may be made from them.
    """

    format: str
    directory: str
    files: tuple[WeightFile, ...]
    source_files: tuple[WeightFile, ...]

    def content_hash(self, config_json: str) -> str:
        """Names the weights and the configuration they run under; equal hash, equal KV."""
        listing = [[file.name, file.size_bytes, file.sha256] for file in self.source_files]
        text = json.dumps([listing, config_json], separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def load(cls, model_dir: Path) -> WeightManifest:
        """Raises ModelLoadError when the manifest is missing or not one of this version."""
        path = model_dir / MANIFEST_FILE
        try:
            fields = json.loads(path.read_text())
            for key in ("files", "source_files"):
                fields[key] = tuple(WeightFile(**file) for file in fields[key])
            return cls(**fields)
        except FileNotFoundError as exc:
            raise ModelLoadError(f"{path}: missing; run `weir model pull` for this model first") from exc
        except (ValueError, TypeError, KeyError) as exc:
            raise ModelLoadError(f"{path}: not a weight manifest of this version: {exc}") from exc

    def checked_paths(self, model_dir: Path) -> list[Path]:
        """The files, in order.

        Raises:
            ModelLoadError: one is missing, or of another size than when it was prepared; names it.
        """
        directory = (model_dir / self.directory).resolve()
        for file in self.files:
            path = directory / file.name
            if not path.is_file():
                raise ModelLoadError(f"{path}: missing; prepare the model again")
            if (size_bytes := path.stat().st_size) != file.size_bytes:
                raise ModelLoadError(f"{path}: has {size_bytes} bytes, {file.size_bytes} when it was prepared")
        return [directory / file.name for file in self.files]
