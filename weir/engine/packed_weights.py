"""The matrices of a model as the CPU kernels read them, in one file that every worker of a machine maps.

The file is written once, beside the prepared model, by the first worker that needs it; it is named by the layout and by
how weights are stored. Where it cannot be written, a worker packs for itself.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import time
from pathlib import Path

import torch

from kernels.cpu.library import LAYOUT
from kernels.cpu.packed_matrix import FOUR_BIT, GROUP, PackedMatrix, RowSource, pack_panels, packed_shape
from kernels.cpu.structs import Format
from weir.core.errors import ModelLoadError
from weir.engine.models.decoder import Decoder
from weir.engine.models.decoder_config import DecoderConfig
from weir.engine.packed_file import FORMAT, PackedFile, write_packed_file
from weir.engine.weights import TakenTensor, TensorSource, Weights

logger = logging.getLogger(__name__)


def choose_format(quantization: str, float_format: Format, rows: list[RowSource]) -> Format:
    """How a matrix made of `rows` is stored.

    Args:
        quantization: auto keeps about the bits that the checkpoint has; int4 takes eight where it has more than four.
        float_format: of what is not quantised.
    """
    is_quantized = all(part.is_quantized for part in rows)
    if quantization == "none" or rows[0].num_inputs % GROUP or (quantization == "auto" and not is_quantized):
        return float_format
    if quantization != "int8" and all(part.format in FOUR_BIT for part in rows):
        return Format.INT4
    return Format.INT8


class PackedWeights:
    """Gives matrices by name; see `weights.Weights`.

    Args:
        library: from `kernels.cpu.library.load`.
        source: the checkpoint.
        model_dir: the prepared model, where the file is or goes.
        quantization: one of `config.QUANTIZATIONS`.
        float_format: of what is not quantised.
    """

    def __init__(
        self, library: ctypes.CDLL, source: TensorSource, model_dir: Path, quantization: str, float_format: Format
    ) -> None:
        self._library = library
        self._source = source
        self._model_dir = model_dir
        self._quantization = quantization
        self._float_format = float_format
        self._file = self._open()
        if self._file is None:
            self._formats = {taken.name: format for taken, format in self._plan()}
        else:
            stored = (name.rpartition(":") for name in self._file.names)
            self._formats = {name: Format[format_name] for name, _, format_name in stored}

    @property
    def is_quantized(self) -> bool:
        """Whether any matrix is one of integers."""
        return not {Format.INT8, Format.INT4}.isdisjoint(self._formats.values())

    def __call__(self, taken: TakenTensor) -> PackedMatrix:
        format = self._formats[taken.name]
        panels = self._pack(taken, format) if self._file is None else self._file.read(_stored_name(taken, format))
        return PackedMatrix(self._library, format, panels, *taken.shape, is_gated=taken.is_gated)

    def _plan(self) -> list[tuple[TakenTensor, Format]]:
        """Every matrix the model takes, and how it is to be stored."""
        meta = torch.device("meta")
        weights = Weights(self._source, torch.float32, meta)
        Decoder(DecoderConfig.load(self._model_dir), weights, 1, meta)
        matrices = [taken for taken in weights.taken if taken.is_matrix]
        return [(taken, choose_format(self._quantization, self._float_format, self._rows(taken))) for taken in matrices]

    def _rows(self, taken: TakenTensor) -> list[RowSource]:
        return [self._source.rows(part) for part in taken.parts]

    def _pack(self, taken: TakenTensor, format: Format) -> torch.Tensor:
        return pack_panels(self._library, format, self._rows(taken), is_gated=taken.is_gated)

    def _open(self) -> PackedFile | None:
        stem = f"packed-{self._quantization}-{self._float_format.name.lower()}"
        path = self._model_dir / f"{stem}-{LAYOUT}-{FORMAT}.safetensors"
        try:
            found = _found(path)
            if found is None:
                with (path.parent / ".packed.lock").open("w") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX)
                    found = _found(path) or self._written(path)
                    for older in self._model_dir.glob(f"{stem}-*.safetensors"):
                        if older != path:  # of another layout; a worker that has it mapped keeps it
                            older.unlink()
            return found
        except OSError as exc:
            logger.warning("packed weights are not kept: %s", exc)
            return None

    def _written(self, path: Path) -> PackedFile:
        started_s = time.monotonic()
        matrices = {_stored_name(taken, format): (taken, format) for taken, format in self._plan()}
        shapes = {
            name: packed_shape(self._library, format, *taken.shape, is_gated=taken.is_gated)
            for name, (taken, format) in matrices.items()
        }
        unfinished = path.with_suffix(".tmp")
        try:
            write_packed_file(unfinished, shapes, lambda name: self._pack(*matrices[name]))
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
        logger.info("packed %d matrices in %.1f s: %s", len(shapes), time.monotonic() - started_s, path)
        return PackedFile(path)


def _found(path: Path) -> PackedFile | None:
    try:
        return PackedFile(path)
    except FileNotFoundError:
        return None
    except ModelLoadError as exc:
        logger.warning("%s; it is written again", exc.message)
        return None


def _stored_name(taken: TakenTensor, format: Format) -> str:
    return f"{taken.name}:{format.name}"
