"""The file of packed weights: what is written is what is read, and what is no such file is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from weir.core.errors import ModelLoadError
from weir.engine.packed_file import PackedFile, write_packed_file

ARRAYS = {
    "a:INT4": torch.arange(6000, dtype=torch.int32).remainder(251).to(torch.uint8).view(3, 2000),
    "b:FLOAT32": torch.full((64,), 7, dtype=torch.uint8),
}


def write(path: Path) -> None:
    write_packed_file(path, {name: array.shape for name, array in ARRAYS.items()}, ARRAYS.__getitem__)


def test_what_is_written_is_read_here_and_by_the_safetensors_library(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write(path)
    packed = PackedFile(path)
    library = load_file(path)
    assert list(packed.names) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert torch.equal(packed.read(name), array)
        assert torch.equal(library[name], array)
    assert packed.read("a:INT4").data_ptr() % 64 == 0


@pytest.mark.parametrize("length", [0, 5, 100, -1])
def test_a_file_cut_short_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "x.safetensors"
    write(path)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ModelLoadError, match=r"x\.safetensors: "):
        PackedFile(path)


def test_a_changed_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write(path)
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match="is damaged"):
        PackedFile(path)


@pytest.mark.parametrize("content", [b"\2\0\0\0\0\0\0\0{}", b"\2\0\0\0\0\0\0\0[]", b"\xff" * 64])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match="no file of packed weights"):
        PackedFile(path)
