// The body of `kernels/rms_norm.py` on a CPU, for rows or for the heads within a row.
#pragma once

#include "step.h"

namespace weir {

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

inline void rms_norm_row(const Op& op, const Batch& batch, int row, float* scratch) {
  const int64_t from = op.is_for_logits ? batch.logits_indices[row] : row;
  float* const to = op.output.data ? op.output.floats(row) : scratch;
  normalize(op.input.floats(from), op.weight, op.input.columns, op.eps, to);
  if (op.quantized.data) quantize_row(op.quantized, row, to);
}

}  // namespace weir
