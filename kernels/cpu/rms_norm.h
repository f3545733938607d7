// The body of `kernels/rms_norm.py` on a CPU, for rows or for the heads within a row; and rows on their way to integers.
#pragma once

#include "step.h"

namespace weir {

constexpr int ROWS_PER_CHUNK = 16;

// `to` may be `from`; both hold `size` floats, with room up to a multiple of LANES.
INLINE void normalize(const float* from, const float* weight, int size, float eps, float* to) {
  Vec squares = Vec{};
  int i = 0;
  for (; i + LANES <= size; i += LANES) {
    const Vec value = load(from + i);
    squares += value * value;
  }
  float sum = sum_lanes(squares);
  for (; i < size; i++) sum += from[i] * from[i];
  const float scale = 1.0f / __builtin_sqrtf(sum / static_cast<float>(size) + eps);
  for (i = 0; i + LANES <= size; i += LANES) store(to + i, load(from + i) * scale * load(weight + i));
  for (; i < size; i++) to[i] = from[i] * scale * weight[i];
}

inline void rms_norm_chunk(const Op& op, const Batch& batch, int chunk, float* scratch) {
  const int first = chunk * ROWS_PER_CHUNK, rows = num_rows(op, batch);
  for (int row = first; row < rows && row < first + ROWS_PER_CHUNK; row++) {
    const int64_t from = op.is_for_logits ? batch.logits_indices[row] : row;
    float* const to = op.output.data ? op.output.floats(row) : scratch;
    normalize(op.input.floats(from), op.weight, op.input.columns, op.eps, to);
    if (op.quantized.data) quantize_row(op.quantized, row, to);
  }
}

// Rows of floats as a matrix of integers wants them.
inline void quantize_chunk(const Op& op, const Batch& batch, int chunk) {
  const int first = chunk * ROWS_PER_CHUNK, rows = num_rows(op, batch);
  for (int row = first; row < rows && row < first + ROWS_PER_CHUNK; row++) {
    quantize_row(op.output, row, op.input.floats(row));
  }
}

}  // namespace weir
