"""The structs of `step.h`, field by field; `library.load` checks that both sides agree on their sizes."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from enum import IntEnum


class Kind(IntEnum):
    EMBEDDING = 0
    RMS_NORM = 1
    QUANTIZE = 2
    LINEAR = 3
    ROTATE_AND_STORE = 4
    ATTENTION = 5


class Format(IntEnum):
    """How a matrix or KV is stored."""

    FLOAT32 = 0
    FLOAT16 = 1
    BFLOAT16 = 2
    INT8 = 3
    INT4 = 4


class RowFormat(IntEnum):
    """How what a matrix is applied to is stored."""

    FLOAT32 = 0
    INT16 = 1
    INT8 = 2


class SourceFormat(IntEnum):
    """How a row of weights comes."""

    FLOAT32 = 0
    FLOAT16 = 1
    BFLOAT16 = 2
    Q8_0 = 3
    Q4_0 = 4
    Q4_1 = 5
    Q4_K = 6


class BufferStruct(ctypes.Structure):
    _fields_ = (("data", c_void_p), ("stride", c_int64), ("columns", c_int32), ("rows", c_int32))


class MatrixStruct(ctypes.Structure):
    _fields_ = (
        ("panels", c_void_p),
        ("panel_bytes", c_int64),
        ("num_outputs", c_int32),
        ("num_inputs", c_int32),
        ("format", c_int32),
        ("unused", c_int32),
    )


class OpStruct(ctypes.Structure):
    _fields_ = (
        ("kind", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("rotary_dim", c_int32),
        ("window", c_int32),
        ("is_for_logits", c_int32),
        ("is_gated", c_int32),
        ("eps", c_float),
        ("scale", c_float),
        ("input", BufferStruct),
        ("output", BufferStruct),
        ("residual", BufferStruct),
        ("quantized", BufferStruct),
        ("matrix", MatrixStruct),
        ("weight", c_void_p),
        ("second_weight", c_void_p),
        ("cos_sin", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
    )


class CacheStruct(ctypes.Structure):
    _fields_ = (("block_bytes", c_int64), ("head_bytes", c_int64), ("block_size", c_int32), ("format", c_int32))


class BatchStruct(ctypes.Structure):
    _fields_ = (
        ("input_ids", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("cu_seqlens_q", c_void_p),
        ("seq_lens", c_void_p),
        ("block_tables", c_void_p),
        ("logits_indices", c_void_p),
        ("table_stride", c_int64),
        ("num_tokens", c_int32),
        ("num_seqs", c_int32),
        ("num_logits", c_int32),
        ("unused", c_int32),
    )


class SampleRowStruct(ctypes.Structure):
    _fields_ = (
        ("scores", c_void_p),
        ("temperature", c_double),
        ("min_p", c_double),
        ("top_p", c_double),
        ("seed", c_uint64),
        ("position", c_uint32),
        ("choice", c_uint32),
        ("top_k", c_int32),
        ("token", c_int32),
    )


STRUCTS = (BufferStruct, MatrixStruct, OpStruct, CacheStruct, BatchStruct, SampleRowStruct)
