// Rows of a packed matrix by token id.
#pragma once

#include "pack.h"
#include "rms_norm.h"

namespace weir {

inline void embedding_chunk(const Op& op, const Batch& batch, int chunk) {
  const int first = chunk * ROWS_PER_CHUNK;
  for (int row = first; row < batch.num_tokens && row < first + ROWS_PER_CHUNK; row++) {
    unpack_row(op.matrix, static_cast<int>(batch.input_ids[row]), op.output.floats(row));
  }
}

}  // namespace weir
