// The bodies of `kernels/rotary_embedding.py` and `kernels/store_kv_cache.py` on a CPU, with the norm of queries and keys
// before them where a model has one: one pass over the rows of a fused projection, [queries, keys, values] in each.
#pragma once

#include "rms_norm.h"
#include "step.h"

namespace weir {

INLINE void rotate(float* head, const float* cos_sin, int rotary_dim) {
  const int half = rotary_dim / 2;
  for (int i = 0; i < half; i++) {
    const float first = head[i], second = head[half + i];
    head[i] = first * cos_sin[i] - second * cos_sin[half + i];
    head[half + i] = second * cos_sin[i] + first * cos_sin[half + i];
  }
}

INLINE void write_head(Format format, uint8_t* to, const float* from, int head_dim) {
  if (format == Format::FLOAT32) {
    memcpy(to, from, sizeof(float) * head_dim);
  } else if (format == Format::INT8) {
    float most = 0;
    for (int i = 0; i < head_dim; i++) most = __builtin_fabsf(from[i]) > most ? __builtin_fabsf(from[i]) : most;
    const float scale = most / 127.0f, inverse = most > 0 ? 127.0f / most : 0.0f;
    for (int i = 0; i < head_dim; i++) to[i] = static_cast<uint8_t>(static_cast<int8_t>(__builtin_rintf(from[i] * inverse)));
    memcpy(to + head_dim, &scale, sizeof scale);
  } else {
    uint16_t* const halves = reinterpret_cast<uint16_t*>(to);
    for (int i = 0; i < head_dim; i++) halves[i] = format == Format::FLOAT16 ? float_to_half(from[i]) : float_to_bfloat(from[i]);
  }
}

inline void rotate_and_store_row(const Op& op, const Cache& cache, const Batch& batch, int row) {
  float* const heads = op.input.floats(row);
  const float* const cos_sin = op.cos_sin + batch.positions[row] * op.rotary_dim;
  const int64_t slot = batch.slots[row];
  const int64_t place = slot / cache.block_size * cache.block_bytes +
                        slot % cache.block_size * cache.token_bytes(op.head_dim);
  for (int index = 0; index < op.num_heads + op.num_kv_heads; index++) {
    float* const head = heads + index * op.head_dim;
    const float* const weight = index < op.num_heads ? op.weight : op.second_weight;
    if (weight) normalize(head, weight, op.head_dim, op.eps, head);
    rotate(head, cos_sin, op.rotary_dim);
  }
  for (int index = 0; index < op.num_kv_heads; index++) {
    const float* const key = heads + (op.num_heads + index) * op.head_dim;
    write_head(cache.format, op.keys + place + index * cache.head_bytes, key, op.head_dim);
    write_head(cache.format, op.values + place + index * cache.head_bytes, key + op.num_kv_heads * op.head_dim, op.head_dim);
  }
}

}  // namespace weir
