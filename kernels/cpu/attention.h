// The bodies of `kernels/decode_attention.py` and `kernels/prefill_attention.py` on a CPU: one function for both.
//
// An item is a run of queries of one sequence for some heads that share their keys; its rows are its queries times those
// heads. Context comes in tiles of 64 tokens that begin at multiples of 64, and each row keeps its own maximum, sum and
// output from tile to tile, so that neither the other rows nor the cut into chunks and blocks can change a bit of it.
// Source: Milakov and Gimelshein 2018, Online normalizer calculation for softmax; Dao 2023, FlashAttention-2, section 3.
#pragma once

#include "step.h"

namespace weir {

struct AttentionScratch {
  float scores[MAX_ROWS * TILE];
  float most[MAX_ROWS], sums[MAX_ROWS];
  const float* keys[TILE];
  const float* values[TILE];
  float* queries;  // [MAX_ROWS][padded], scaled
  float* outputs;  // [MAX_ROWS][padded]
  float* tile;     // [2][TILE][padded]: keys and values as floats, where the cache holds something else
};

INLINE int padded(int head_dim) { return ceil_div(head_dim, LANES) * LANES; }

// Products of R rows from r on with the keys of tokens t to t + 3.
template <int R>
INLINE void score(AttentionScratch& s, int r, int t, int size) {
  Vec sums[R][4];
  UNROLL for (int i = 0; i < R; i++) {
    UNROLL for (int j = 0; j < 4; j++) sums[i][j] = Vec{};
  }
  const float* const queries = s.queries + r * size;
  for (int d = 0; d < size; d += LANES) {
    Vec query[R];
    UNROLL for (int i = 0; i < R; i++) query[i] = load(queries + i * size + d);
    UNROLL for (int j = 0; j < 4; j++) {
      const Vec key = load(s.keys[t + j] + d);
      UNROLL for (int i = 0; i < R; i++) sums[i][j] += query[i] * key;
    }
  }
  float* const scores = s.scores + r * TILE + t;
  UNROLL for (int i = 0; i < R; i++) {
    sum_four(sums[i], scores + i * TILE);
  }
}

// Add tokens first to end of the tile, weighted, to R rows of output, V vectors from element d on.
template <int R, int V>
INLINE void accumulate(const AttentionScratch& s, int r, int d, int size, int first, int end) {
  float* const outputs = s.outputs + r * size + d;
  const float* const scores = s.scores + r * TILE;
  Vec sums[R][V];
  UNROLL for (int i = 0; i < R; i++) {
    UNROLL for (int v = 0; v < V; v++) sums[i][v] = load(outputs + i * size + v * LANES);
  }
  for (int token = first; token < end; token++) {
    const float* const values = s.values[token] + d;
    Vec weight[R];  // with one value at a time, 3 rows of 4 vectors fill 16 registers
    UNROLL for (int i = 0; i < R; i++) weight[i] = splat(scores[i * TILE + token]);
    UNROLL for (int v = 0; v < V; v++) {
      const Vec value = load(values + v * LANES);
      UNROLL for (int i = 0; i < R; i++) sums[i][v] += weight[i] * value;
    }
  }
  UNROLL for (int i = 0; i < R; i++) {
    UNROLL for (int v = 0; v < V; v++) store(outputs + i * size + v * LANES, sums[i][v]);
  }
}

template <int R>
INLINE void accumulate_rows(const AttentionScratch& s, int r, int size, int first, int end) {
  int d = 0;
  for (; d + 4 * LANES <= size; d += 4 * LANES) accumulate<R, 4>(s, r, d, size, first, end);
  for (; d < size; d += LANES) accumulate<R, 1>(s, r, d, size, first, end);
}

// Turn one row's scores of tokens first to end into weights, and rescale what it has so far.
INLINE void soften(AttentionScratch& s, int r, int size, int first, int end) {
  float* const scores = s.scores + r * TILE;
  for (int t = 0; t < first; t++) scores[t] = -INFINITY;
  for (int t = end; t < TILE; t++) scores[t] = -INFINITY;
  Vec most = load(scores);
  UNROLL for (int t = LANES; t < TILE; t += LANES) most = maximum(most, load(scores + t));
  const float tile_most = max_lanes(most), old_most = s.most[r];
  const float new_most = tile_most > old_most ? tile_most : old_most;
  Vec sum = Vec{};
  for (int t = 0; t < TILE; t += LANES) {
    const Vec weight = power_of_two(load(scores + t) - new_most);
    store(scores + t, weight);
    sum += weight;
  }
  if (new_most > old_most) {
    const float shrink = power_of_two(splat(old_most - new_most))[0];
    s.most[r] = new_most;
    s.sums[r] *= shrink;
    float* const outputs = s.outputs + r * size;
    for (int d = 0; d < size; d += LANES) store(outputs + d, load(outputs + d) * shrink);
  }
  s.sums[r] += sum_lanes(sum);
}

// One head of one token as floats, padded with zeros.
INLINE void read_head(Format format, const uint8_t* from, int head_dim, int size, float* to) {
  const uint16_t* const halves = reinterpret_cast<const uint16_t*>(from);
  int d = 0;
  if (format == Format::FLOAT16) {
    for (; d + LANES <= head_dim; d += LANES) store(to + d, load_half(halves + d));
    for (; d < head_dim; d++) to[d] = half_to_float(halves[d]);
  } else if (format == Format::BFLOAT16) {
    for (; d + LANES <= head_dim; d += LANES) store(to + d, load_bfloat(halves + d));
    for (; d < head_dim; d++) to[d] = bfloat_to_float(halves[d]);
  } else {
    memcpy(to, from, sizeof(float) * head_dim);
    d = head_dim;
  }
  for (; d < size; d++) to[d] = 0;
}

// How attention is cut: items of up to `queries` queries and `heads` heads, all sequences one after the other.
struct AttentionCut {
  int heads, queries, num_head_runs;

  AttentionCut(const Op& op, const Batch& batch, int num_threads) {
    const int group = op.num_heads / op.num_kv_heads;
    heads = group < MAX_ROWS ? group : MAX_ROWS;
    if (batch.num_seqs * op.num_kv_heads < 4 * num_threads && batch.num_tokens == batch.num_seqs) heads = 1;
    queries = MAX_ROWS / heads < 16 ? MAX_ROWS / heads : 16;
    num_head_runs = op.num_kv_heads * ceil_div(group, heads);
  }

  int num_items(const Batch& batch) const {
    int total = 0;
    for (int seq = 0; seq < batch.num_seqs; seq++) {
      total += ceil_div(batch.cu_seqlens_q[seq + 1] - batch.cu_seqlens_q[seq], queries);
    }
    return total * num_head_runs;
  }
};

inline void attend(const Op& op, const Cache& cache, const Batch& batch, int seq, int first_row, int num_queries, int first_head,
                   int num_heads, AttentionScratch& s) {
  const int head_dim = op.head_dim, size = padded(head_dim), num_rows = num_queries * num_heads;
  const int64_t token_bytes = head_dim * cache.element_bytes();
  const int64_t head_offset = first_head / (op.num_heads / op.num_kv_heads) * cache.head_bytes;
  const int32_t* const table = batch.block_tables + seq * batch.table_stride;
  const bool is_direct = cache.format == Format::FLOAT32 && size == head_dim;
  const int first_position = static_cast<int>(batch.positions[first_row]);
  for (int r = 0; r < num_rows; r++) {
    const float* const query = op.input.floats(first_row + r / num_heads) + (first_head + r % num_heads) * head_dim;
    float* const to = s.queries + r * size;
    for (int d = 0; d < head_dim; d++) to[d] = query[d] * (op.scale * 1.44269504f);  // powers of two, not of e
    for (int d = head_dim; d < size; d++) to[d] = 0;
    memset(s.outputs + r * size, 0, sizeof(float) * size);
    s.most[r] = -INFINITY;
    s.sums[r] = 0;
  }
  const int last_end = first_position + num_queries;
  const int first_seen = op.window && first_position + 1 > op.window ? first_position + 1 - op.window : 0;
  const int block_size = cache.block_size;
  // The places of tokens start to end - 1 of the sequence, block by block.
  const auto for_each_place = [&](int start, int end, auto&& visit) {
    int block = start / block_size;
    for (int token = start; token < end; block++) {
      const int block_end = (block + 1) * block_size < end ? (block + 1) * block_size : end;
      int64_t place = table[block] * cache.block_bytes + head_offset + (token - block * block_size) * token_bytes;
      for (; token < block_end; token++, place += token_bytes) visit(token - start, place);
    }
  };
  for (int start = first_seen / TILE * TILE; start < last_end; start += TILE) {
    const int count = last_end - start < TILE ? last_end - start : TILE;
    for_each_place(start, start + count, [&](int t, int64_t place) {
      prefetch(op.values + place, token_bytes);
      if (is_direct) {
        s.keys[t] = reinterpret_cast<const float*>(op.keys + place);
        s.values[t] = reinterpret_cast<const float*>(op.values + place);
      } else {
        float* const key = s.tile + t * size;
        float* const value = s.tile + (TILE + t) * size;
        if (start + t >= first_seen) {
          read_head(cache.format, op.keys + place, head_dim, size, key);
          read_head(cache.format, op.values + place, head_dim, size, value);
        }
        s.keys[t] = key;
        s.values[t] = value;
      }
    });
    if (start + TILE < last_end) {
      const int next_end = start + 2 * TILE < last_end ? start + 2 * TILE : last_end;
      for_each_place(start + TILE, next_end, [&](int, int64_t place) { prefetch(op.keys + place, token_bytes); });
    }
    for (int t = count; t < ceil_div(count, 4) * 4; t++) s.keys[t] = s.keys[count - 1];
    int r = 0;
    const int skipped = (first_seen > start ? first_seen - start : 0) / 4 * 4;
    for (; r + 3 <= num_rows; r += 3) {
      for (int t = skipped; t < count; t += 4) score<3>(s, r, t, size);
    }
    for (; r < num_rows; r++) {
      for (int t = skipped; t < count; t += 4) score<1>(s, r, t, size);
    }
    for (r = 0; r < num_rows; r++) {
      const int end = first_position + r / num_heads + 1;  // of what this row sees
      const int begin = op.window && end > op.window ? end - op.window : 0;
      const int first = begin > start ? begin - start : 0, last = end - start < TILE ? end - start : TILE;
      if (first < last) {
        soften(s, r, size, first, last);
      } else {
        memset(s.scores + r * TILE, 0, sizeof(float) * TILE);
      }
    }
    const int first = first_seen > start ? first_seen - start : 0;
    for (r = 0; r + 3 <= num_rows; r += 3) accumulate_rows<3>(s, r, size, first, count);
    if (num_rows - r == 2) accumulate_rows<2>(s, r, size, first, count);
    if (num_rows - r == 1) accumulate_rows<1>(s, r, size, first, count);
  }
  for (int r = 0; r < num_rows; r++) {
    float* const from = s.outputs + r * size;
    const float inverse = 1.0f / s.sums[r];
    for (int d = 0; d < size; d += LANES) store(from + d, load(from + d) * inverse);
    const int64_t row = first_row + r / num_heads;
    const int place = (first_head + r % num_heads) * head_dim;
    if (op.output.data) memcpy(op.output.floats(row) + place, from, sizeof(float) * head_dim);
    for (int d = 0; op.quantized.data && d < head_dim; d += GROUP) {
      quantize_group(op.quantized, row, (place + d) / GROUP, from + d);
    }
  }
}

inline void attention_chunk(const Op& op, const Cache& cache, const Batch& batch, int num_threads, int item, AttentionScratch& s) {
  const AttentionCut cut(op, batch, num_threads);
  const int run = item % cut.num_head_runs, group = op.num_heads / op.num_kv_heads;
  const int runs_per_group = cut.num_head_runs / op.num_kv_heads;
  const int offset = run % runs_per_group * cut.heads;
  const int first_head = run / runs_per_group * group + offset;
  int index = item / cut.num_head_runs;
  for (int seq = 0; seq < batch.num_seqs; seq++) {
    const int first = batch.cu_seqlens_q[seq], rows = batch.cu_seqlens_q[seq + 1] - first;
    const int num_runs = ceil_div(rows, cut.queries);
    if (index < num_runs) {
      const int start = index * cut.queries, left = rows - start;
      const int num_heads = group - offset < cut.heads ? group - offset : cut.heads;
      return attend(op, cache, batch, seq, first + start, left < cut.queries ? left : cut.queries, first_head, num_heads, s);
    }
    index -= num_runs;
  }
}

}  // namespace weir
