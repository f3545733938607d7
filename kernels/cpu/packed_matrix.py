"""A weight matrix in the order in which the CPU's linear op reads it; see `pack.h` for the layouts."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.cpu.structs import Format, MatrixStruct, RowFormat, SourceFormat

PANEL = 16
GROUP = 32
ROW_FORMATS = {Format.INT8: RowFormat.INT16, Format.INT4: RowFormat.INT8}
"""What rows become before a matrix of integers is applied to them; floats stay floats."""

_SOURCES = {
    torch.float32: SourceFormat.FLOAT32,
    torch.float16: SourceFormat.FLOAT16,
    torch.bfloat16: SourceFormat.BFLOAT16,
}
FOUR_BIT = frozenset({SourceFormat.Q4_0, SourceFormat.Q4_1, SourceFormat.Q4_K})


@dataclass(frozen=True, slots=True)
class RowSource:
    """Rows of a matrix as a checkpoint stores them.

    Attributes:
        data: [num_rows, elements or bytes], contiguous rows: floats, or uint8 for a format of blocks.
        format: of its rows.
        num_inputs: weights of a row.
        is_quantized: whether they were of less than 16 bits in the checkpoint, though they may come as floats.
    """

    data: torch.Tensor
    format: SourceFormat
    num_inputs: int
    is_quantized: bool = False

    @classmethod
    def of_floats(cls, weight: torch.Tensor, *, is_quantized: bool = False) -> RowSource:
        """Rows of a tensor [num_rows, num_inputs]."""
        return cls(weight.contiguous(), _SOURCES[weight.dtype], weight.shape[1], is_quantized)


class PackedMatrix:
    """A matrix [num_outputs, num_inputs].

    Args:
        library: from `library.load`.
        format: how it is stored.
        panels: the bytes, of `packed_shape`; kept.
        is_gated: of its two halves, rows lie in turns of eight, as a gated linear op wants them.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        format: Format,
        panels: torch.Tensor,
        num_outputs: int,
        num_inputs: int,
        *,
        is_gated: bool = False,
    ) -> None:
        assert tuple(panels.shape) == packed_shape(library, format, num_outputs, num_inputs, is_gated=is_gated)
        self.format = format
        self.num_outputs = num_outputs
        self.num_inputs = num_inputs
        self.num_bytes = panels.numel()
        self._library = library
        self._panels = panels
        self._order = _row_order(num_outputs, is_gated)

    @classmethod
    def pack(
        cls, library: ctypes.CDLL, format: Format, sources: Sequence[RowSource], *, is_gated: bool = False
    ) -> PackedMatrix:
        """Pack rows, one part below the other. INT8 and INT4 need a multiple of 32 inputs, INT4 four-bit sources."""
        panels = pack_panels(library, format, sources, is_gated=is_gated)
        num_outputs = sum(len(source.data) for source in sources)
        return cls(library, format, panels, num_outputs, sources[0].num_inputs, is_gated=is_gated)

    @property
    def row_format(self) -> RowFormat:
        """What its rows must be."""
        return ROW_FORMATS.get(self.format, RowFormat.FLOAT32)

    @property
    def struct(self) -> MatrixStruct:
        """For the library; valid while this object lives."""
        return MatrixStruct(
            panels=self._panels.data_ptr(),
            panel_bytes=self._panels.shape[1],
            num_outputs=len(self._order),
            num_inputs=self.num_inputs,
            format=int(self.format),
        )

    def packed_bias(self, bias: torch.Tensor) -> torch.Tensor:
        """`bias` [num_outputs] as the library wants it: float32, one for each packed row up to a whole panel."""
        packed = torch.zeros(len(self._panels) * PANEL)
        packed[: len(self._order)] = torch.where(self._order >= 0, bias.float()[self._order.clamp_min(0)], 0.0)
        return packed

    def unpacked(self) -> torch.Tensor:
        """What it stands for: float32 [num_outputs, num_inputs]."""
        rows = torch.empty(self.num_outputs, self.num_inputs)
        struct = self.struct
        for packed_row, row in enumerate(self._order.tolist()):
            if row >= 0:
                to = ctypes.c_void_p(rows[row].data_ptr())
                self._library.weir_unpack_row(ctypes.byref(struct), packed_row, to)
        return rows


def packed_shape(
    library: ctypes.CDLL, format: Format, num_outputs: int, num_inputs: int, *, is_gated: bool
) -> tuple[int, int]:
    """Panels of a matrix, and the bytes of each."""
    num_rows = len(_row_order(num_outputs, is_gated))
    return -(-num_rows // PANEL), int(library.weir_panel_bytes(int(format), num_inputs))


def pack_panels(
    library: ctypes.CDLL, format: Format, sources: Sequence[RowSource], *, is_gated: bool = False
) -> torch.Tensor:
    """The bytes of a matrix made of `sources`, one below the other: uint8 of `packed_shape`."""
    pointers = torch.cat([_row_pointers(source) for source in sources])
    formats = torch.cat([torch.full((len(each.data),), each.format, dtype=torch.uint8) for each in sources])
    num_inputs = sources[0].num_inputs
    panels = torch.empty(packed_shape(library, format, len(pointers), num_inputs, is_gated=is_gated), dtype=torch.uint8)
    order = _row_order(len(pointers), is_gated)
    rows = pointers[order.clamp_min(0)] * (order >= 0)
    formats = formats[order.clamp_min(0)]
    library.weir_pack(
        int(format),
        ctypes.c_void_p(rows.data_ptr()),
        ctypes.c_void_p(formats.data_ptr()),
        len(rows),
        num_inputs,
        ctypes.c_void_p(panels.data_ptr()),
    )
    return panels


def _row_order(num_outputs: int, is_gated: bool) -> torch.Tensor:
    """The row in each packed place, -1 for none; gated: eight gates, their eight ups, and so on."""
    if not is_gated:
        return torch.arange(num_outputs)
    num_gates = num_outputs // 2
    runs = -(-num_gates // 8)
    gates = torch.arange(runs * 8).view(runs, 1, 8)
    both = torch.cat((gates, gates + num_gates), dim=1)
    return torch.where((gates < num_gates).expand_as(both), both, -1).flatten()


def _row_pointers(source: RowSource) -> torch.Tensor:
    row_bytes = source.data.stride(0) * source.data.element_size()
    return source.data.data_ptr() + torch.arange(len(source.data)) * row_bytes
