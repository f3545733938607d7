// What one call of the library computes: a list of ops over rows that lie in buffers, and the batch they are for.
// `plan.py` mirrors every struct of this file; `weir_struct_sizes` keeps the two equal.
#pragma once

#include <stdint.h>

#include "simd.h"

namespace weir {

constexpr int PANEL = 16;        // outputs of a matrix that lie side by side
constexpr int GROUP = 32;        // inputs that share a scale
constexpr int TILE = 64;         // tokens of context that attention takes at a time, from position 0 on
constexpr int MAX_ROWS = 64;     // query rows times heads that attention works on at a time

enum class Kind : int32_t { EMBEDDING, RMS_NORM, QUANTIZE, LINEAR, ROTATE_AND_STORE, ATTENTION };
enum class Format : int32_t { FLOAT32, FLOAT16, BFLOAT16, INT8, INT4 };  // of matrices and KV
enum class Rows : int32_t { FLOAT32, INT16, INT8 };  // of what a matrix is applied to

// Rows of `columns` values. FLOAT32: that many floats. INT16 and INT8: that many integers, a multiple of GROUP, then a
// scale for each group, then each group's sum of what the integers stand for.
struct Buffer {
  uint8_t* data;
  int64_t stride;  // bytes from row to row
  int32_t columns;
  Rows rows;

  float* floats(int64_t row) const { return reinterpret_cast<float*>(data + row * stride); }
  template <class Integer>
  Integer* integers(int64_t row) const { return reinterpret_cast<Integer*>(data + row * stride); }
  float* scales(int64_t row) const {
    return reinterpret_cast<float*>(data + row * stride + int64_t{columns} * (rows == Rows::INT16 ? 2 : 1));
  }
};

// A matrix [num_outputs, num_inputs] as `pack.h` lays it out.
struct Matrix {
  const uint8_t* panels;
  int64_t panel_bytes;
  int32_t num_outputs;
  int32_t num_inputs;
  Format format;
  int32_t unused;
};

struct Op {
  Kind kind;
  int32_t num_heads, num_kv_heads, head_dim, rotary_dim, window;  // window: 0 for none
  int32_t is_for_logits;                                          // its output has a row for each wanted logit
  int32_t is_gated;                                               // LINEAR: silu of even runs of 8 outputs times odd runs
  float eps, scale;
  Buffer input, output, residual;  // residual: added to LINEAR's output; data is null for none
  Buffer quantized;                // the output once more, as integers; output.data may be null then
  Matrix matrix;                   // LINEAR and EMBEDDING
  const float* weight;             // RMS_NORM; ROTATE_AND_STORE: of queries, null for none
  const float* second_weight;      // LINEAR: its bias; ROTATE_AND_STORE: of keys
  const float* cos_sin;            // [positions, rotary_dim]
  uint8_t* keys;                   // one layer's first block in the cache
  uint8_t* values;
};

// Keys and values. One head of one token: `head_dim` values; INT8: that many integers, then their float scale.
struct Cache {
  int64_t block_bytes, head_bytes;  // from block to block, from head to head
  int32_t block_size;
  Format format;

  int64_t token_bytes(int head_dim) const {
    if (format == Format::INT8) return head_dim + sizeof(float);
    return int64_t{head_dim} * (format == Format::FLOAT32 ? 4 : 2);
  }
};

struct Batch {
  const int64_t* input_ids;
  const int64_t* positions;
  const int64_t* slots;
  const int32_t* cu_seqlens_q;
  const int32_t* seq_lens;
  const int32_t* block_tables;
  const int64_t* logits_indices;
  int64_t table_stride;
  int32_t num_tokens, num_seqs, num_logits, unused;
};

INLINE int num_rows(const Op& op, const Batch& batch) { return op.is_for_logits ? batch.num_logits : batch.num_tokens; }
INLINE int ceil_div(int a, int b) { return (a + b - 1) / b; }

// One group of a row, as integers.
INLINE void quantize_group(const Buffer& to, int64_t row, int group, const float* values) {
  const float largest = to.rows == Rows::INT16 ? 32767.0f : 127.0f;
  Vec most = Vec{};
  UNROLL for (int i = 0; i < GROUP; i += LANES) {
    const Vec value = load(values + i);
    most = maximum(most, maximum(value, -value));
  }
  const float peak = max_lanes(most);
  const float scale = peak / largest, inverse = peak > 0 ? largest / peak : 0.0f;
  IntVec rounded[GROUP / LANES], sums = IntVec{};
  UNROLL for (int i = 0; i < GROUP / LANES; i++) {
    const Vec shifted = load(values + i * LANES) * inverse + 12582912.0f;  // 1.5 * 2^23: rounds to the nearest integer
    rounded[i] = reinterpret_cast<IntVec>(shifted) - 0x4b400000;
    sums += rounded[i];
  }
  int32_t sum = 0;
  UNROLL for (int lane = 0; lane < LANES; lane++) sum += sums[lane];
  if (to.rows == Rows::INT16) {
    store_narrow(to.integers<int16_t>(row) + group * GROUP, rounded);
  } else {
    store_narrow(to.integers<int8_t>(row) + group * GROUP, rounded);
  }
  float* const scales = to.scales(row);
  scales[group] = scale;
  scales[to.columns / GROUP + group] = scale * static_cast<float>(sum);
}

INLINE void quantize_row(const Buffer& to, int64_t row, const float* from) {
  for (int group = 0; group < to.columns / GROUP; group++) quantize_group(to, row, group, from + group * GROUP);
}

}  // namespace weir
