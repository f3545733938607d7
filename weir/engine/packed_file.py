"""Named arrays of bytes in one file that every worker of a machine maps, on huge pages where the system can.

It is a safetensors file of U8 tensors whose metadata has their digest. A step reads all of it once, so with pages of
4 KiB a step of one sequence is 4 to 7 % slower. Linux maps huge pages of a file only if the page cache holds it in
such, which it does when it reads the file into a mapping that asks for them, not when the file is written; so the
writer makes the cache forget it.

Source: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash

from weir.core.errors import ModelLoadError
from weir.engine.huge_pages import prefer_huge_pages

FORMAT = 2
"""In the names of files, so that no version of Weir meets what another would read differently."""

_HEADER_ALIGNMENT = 64
_LENGTH_BYTES = 8
_METADATA = "__metadata__"
_DIGEST = "xxh3_64"


class PackedFile:
    """What `write_packed_file` wrote.

    Raises:
        ModelLoadError: the file is damaged or of another kind.
    """

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                self._mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            prefer_huge_pages(self._mapping)
            header_bytes = int.from_bytes(self._mapping[:_LENGTH_BYTES], "little")
            self._data_offset = _LENGTH_BYTES + header_bytes
            self._header: dict[str, Any] = json.loads(self._mapping[_LENGTH_BYTES : self._data_offset])
            digest = self._header.pop(_METADATA)[_DIGEST]
        except (ValueError, TypeError, KeyError, AttributeError) as exc:
            raise ModelLoadError(f"{path}: no file of packed weights: {exc!r}") from exc
        if xxhash.xxh3_64_hexdigest(memoryview(self._mapping)[self._data_offset :]) != digest:
            raise ModelLoadError(f"{path}: is damaged")

    @property
    def names(self) -> Sequence[str]:
        return list(self._header)

    def read(self, name: str) -> torch.Tensor:
        """A view of the mapping, uint8; treat it as read-only."""
        start, end = self._header[name]["data_offsets"]
        data = torch.frombuffer(self._mapping, dtype=torch.uint8, count=end - start, offset=self._data_offset + start)
        return data.view(self._header[name]["shape"])


def write_packed_file(path: Path, shapes: Mapping[str, Sequence[int]], produce: Callable[[str], torch.Tensor]) -> None:
    """Write arrays one after the other, holding one at a time in memory. The file is on disk when this returns.

    Args:
        shapes: in the order of the data.
        produce: gives the bytes of a name, uint8 of its shape.
    """
    digest = xxhash.xxh3_64()
    header: dict[str, Any] = {_METADATA: {_DIGEST: digest.hexdigest()}}
    offset = 0
    for name, shape in shapes.items():
        offsets = [offset, offset + math.prod(shape)]
        header[name] = {"dtype": "U8", "shape": list(shape), "data_offsets": offsets}
        offset = offsets[1]
    with path.open("wb") as file:
        file.write(_head(header))
        for name, shape in shapes.items():
            data = produce(name)
            assert (data.dtype, tuple(data.shape)) == (torch.uint8, tuple(shape)), name
            content = data.contiguous().flatten().numpy().data
            digest.update(content)
            file.write(content)
        header[_METADATA][_DIGEST] = digest.hexdigest()
        file.seek(0)
        file.write(_head(header))
        file.flush()
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _head(header: Mapping[str, Any]) -> bytes:
    """What stands before the data; as long for any digest."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % _HEADER_ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text
