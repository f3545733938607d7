// The bodies of `kernels/decode_attention.py` and `kernels/prefill_attention.py` on a CPU: one function for both.
//
// An item is a run of queries of one sequence for some heads that share their keys; its rows are its queries times those
// heads. Context comes in tiles of 64 tokens that begin at multiples of 64, and each row keeps its own maximum, sum and
// output from tile to tile, so that neither the other rows nor the cut into chunks and blocks can change a bit of it.
// Source: Milakov and Gimelshein 2018, Online normalizer calculation for softmax; Dao 2023, FlashAttention-2, section 3.
#pragma once

#include <type_traits>

#include "step.h"

namespace weir {

constexpr int ATTENTION_CHUNKS = 16;  // a thread, at most
constexpr int DIRECT_ROWS = 3;  // up to so many rows, keys and values are converted as they are read, not once for all

struct AttentionScratch {
  float scores[MAX_ROWS * TILE];
  float most[MAX_ROWS], sums[MAX_ROWS];
  float* queries;  // [MAX_ROWS][padded], scaled
  float* outputs;  // [MAX_ROWS][padded]
  float* tile;     // [2][TILE][padded]: keys and values as floats
};

// A run of queries of one sequence for heads that share their keys.
struct AttentionItem {
  int seq, first_row, num_queries, first_head, num_heads;
  int first_seen, end;  // positions of context: the first that any query sees, and one beyond the last

  int first_tile() const { return first_seen / TILE * TILE; }
};

// How attention is cut into items, all sequences one after the other, and items into chunks.
struct AttentionCut {
  const Op& op;
  const Batch& batch;
  int group, heads, queries, runs_per_group, num_items, num_chunks;

  AttentionCut(const Op& op, const Batch& batch, int num_threads) : op(op), batch(batch) {
    group = op.num_heads / op.num_kv_heads;
    heads = group < MAX_ROWS ? group : MAX_ROWS;
    queries = MAX_ROWS / heads < 16 ? MAX_ROWS / heads : 16;
    runs_per_group = ceil_div(group, heads);
    int num_runs = 0;
    for (int seq = 0; seq < batch.num_seqs; seq++) num_runs += num_query_runs(seq);
    num_items = num_runs * op.num_kv_heads * runs_per_group;
    num_chunks = num_items < ATTENTION_CHUNKS * num_threads ? num_items : ATTENTION_CHUNKS * num_threads;
  }

  int num_query_runs(int seq) const { return ceil_div(batch.cu_seqlens_q[seq + 1] - batch.cu_seqlens_q[seq], queries); }

  AttentionItem item(int index) const {
    AttentionItem item{};
    const int num_head_runs = op.num_kv_heads * runs_per_group;
    int query_run = index / num_head_runs;
    for (; query_run >= num_query_runs(item.seq); item.seq++) query_run -= num_query_runs(item.seq);
    const int head_run = index % num_head_runs, offset = head_run % runs_per_group * heads;
    item.first_head = head_run / runs_per_group * group + offset;
    item.num_heads = group - offset < heads ? group - offset : heads;
    item.first_row = batch.cu_seqlens_q[item.seq] + query_run * queries;
    const int left = batch.cu_seqlens_q[item.seq + 1] - item.first_row;
    item.num_queries = left < queries ? left : queries;
    const int position = static_cast<int>(batch.positions[item.first_row]);
    item.first_seen = op.window && position + 1 > op.window ? position + 1 - op.window : 0;
    item.end = position + item.num_queries;
    return item;
  }
};

// Where the heads of a tile's tokens are: `heads[t]` is token t's key, its value lies `to_value` bytes further on.
struct TilePlaces {
  const uint8_t* heads[TILE];
  int64_t to_value;
  int head_dim, count;

  // Of the tile of `item` that begins at `start`, block by block.
  void find(const Op& op, const Cache& cache, const Batch& batch, const AttentionItem& item, int start) {
    const uint8_t* const keys = op.keys + item.first_head / (op.num_heads / op.num_kv_heads) * cache.head_bytes;
    const int32_t* const table = batch.block_tables + item.seq * batch.table_stride;
    const int block_size = cache.block_size, end = start + TILE < item.end ? start + TILE : item.end;
    const int64_t token_bytes = cache.token_bytes(op.head_dim);
    head_dim = op.head_dim;
    to_value = op.values - op.keys;
    count = end - start;
    int block = start / block_size;
    for (int token = start; token < end; block++) {
      const int block_end = (block + 1) * block_size < end ? (block + 1) * block_size : end;
      const uint8_t* head = keys + table[block] * cache.block_bytes + (token - block * block_size) * token_bytes;
      for (; token < block_end; token++, head += token_bytes) heads[token - start] = head;
    }
    for (int t = count; t % 4; t++) heads[t] = heads[count - 1];  // scored with the others of its four
  }
};

INLINE int padded(int head_dim) { return ceil_div(head_dim, LANES) * LANES; }

// What the integers of an INT8 head are multiplied with: it stands behind them.
INLINE float scale_of_head(const uint8_t* head, int head_dim) {
  float scale;
  memcpy(&scale, head + head_dim, sizeof scale);
  return scale;
}

template <Format FORMAT>
INLINE float load_element(const uint8_t* head, int d, int head_dim) {
  if constexpr (FORMAT == Format::FLOAT32) return reinterpret_cast<const float*>(head)[d];
  if constexpr (FORMAT == Format::FLOAT16) return half_to_float(reinterpret_cast<const uint16_t*>(head)[d]);
  if constexpr (FORMAT == Format::BFLOAT16) return bfloat_to_float(reinterpret_cast<const uint16_t*>(head)[d]);
  return static_cast<int8_t>(head[d]) * scale_of_head(head, head_dim);
}

// Elements d to d + LANES - 1 of one head of one token.
template <Format FORMAT>
INLINE Vec load_head(const uint8_t* head, int d, int head_dim) {
  if constexpr (FORMAT == Format::FLOAT32) return load(reinterpret_cast<const float*>(head) + d);
  if constexpr (FORMAT == Format::FLOAT16) return load_half(reinterpret_cast<const uint16_t*>(head) + d);
  if constexpr (FORMAT == Format::BFLOAT16) return load_bfloat(reinterpret_cast<const uint16_t*>(head) + d);
  if constexpr (FORMAT == Format::INT8) {
    return load_int8(reinterpret_cast<const int8_t*>(head) + d) * scale_of_head(head, head_dim);
  }
}

// Products of R rows from r on with the keys of tokens t to t + 3.
template <Format FORMAT, int R>
INLINE void score(AttentionScratch& s, const TilePlaces& places, int r, int t, int size) {
  Vec sums[R][4];
  UNROLL for (int i = 0; i < R; i++) {
    UNROLL for (int j = 0; j < 4; j++) sums[i][j] = Vec{};
  }
  const float* const queries = s.queries + r * size;
  for (int d = 0; d < size; d += LANES) {
    Vec query[R];
    UNROLL for (int i = 0; i < R; i++) query[i] = load(queries + i * size + d);
    UNROLL for (int j = 0; j < 4; j++) {
      const Vec key = load_head<FORMAT>(places.heads[t + j], d, places.head_dim);
      UNROLL for (int i = 0; i < R; i++) sums[i][j] += query[i] * key;
    }
  }
  float* const scores = s.scores + r * TILE + t;
  UNROLL for (int i = 0; i < R; i++) {
    sum_four(sums[i], scores + i * TILE);
  }
}

// Add tokens first to end of the tile, weighted, to R rows of output, V vectors from element d on.
template <Format FORMAT, int R, int V>
INLINE void accumulate(const AttentionScratch& s, const TilePlaces& places, int r, int d, int size, int first, int end) {
  float* const outputs = s.outputs + r * size + d;
  const float* const scores = s.scores + r * TILE;
  Vec sums[R][V];
  UNROLL for (int i = 0; i < R; i++) {
    UNROLL for (int v = 0; v < V; v++) sums[i][v] = load(outputs + i * size + v * LANES);
  }
  for (int token = first; token < end; token++) {
    const uint8_t* const head = places.heads[token] + places.to_value;
    Vec weight[R];  // with one value at a time, 3 rows of 4 vectors fill 16 registers
    UNROLL for (int i = 0; i < R; i++) weight[i] = splat(scores[i * TILE + token]);
    UNROLL for (int v = 0; v < V; v++) {
      const Vec value = load_head<FORMAT>(head, d + v * LANES, places.head_dim);
      UNROLL for (int i = 0; i < R; i++) sums[i][v] += weight[i] * value;
    }
  }
  UNROLL for (int i = 0; i < R; i++) {
    UNROLL for (int v = 0; v < V; v++) store(outputs + i * size + v * LANES, sums[i][v]);
  }
}

template <Format FORMAT, int R>
INLINE void accumulate_rows(const AttentionScratch& s, const TilePlaces& places, int r, int size, int first, int end) {
  int d = 0;
  for (; d + 4 * LANES <= size; d += 4 * LANES) accumulate<FORMAT, R, 4>(s, places, r, d, size, first, end);
  for (; d < size; d += LANES) accumulate<FORMAT, R, 1>(s, places, r, d, size, first, end);
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
template <Format FORMAT>
INLINE void read_head(const uint8_t* from, int head_dim, int size, float* to) {
  int d = 0;
  for (; d + LANES <= head_dim; d += LANES) store(to + d, load_head<FORMAT>(from, d, head_dim));
  for (; d < head_dim; d++) to[d] = load_element<FORMAT>(from, d, head_dim);
  for (; d < size; d++) to[d] = 0;
}

// Take one tile into the rows' outputs. `next`: where the tile after it is, which is fetched meanwhile.
template <Format FORMAT>
INLINE void attend_tile(const Op& op, AttentionScratch& s, const AttentionItem& item, int start, const TilePlaces& places,
                        const TilePlaces& next, int64_t token_bytes) {
  const int size = padded(places.head_dim), num_rows = item.num_queries * item.num_heads;
  const int first = item.first_seen > start ? item.first_seen - start : 0;
  int r;
  for (int t = first / 4 * 4; t < places.count; t += 4) {
    for (int i = t; i < t + 4 && i < next.count; i++) {
      prefetch(next.heads[i], token_bytes);
      prefetch(next.heads[i] + next.to_value, token_bytes);
    }
    for (r = 0; r + 3 <= num_rows; r += 3) score<FORMAT, 3>(s, places, r, t, size);
    for (; r < num_rows; r++) score<FORMAT, 1>(s, places, r, t, size);
  }
  for (r = 0; r < num_rows; r++) {
    const int end = item.end - item.num_queries + r / item.num_heads + 1;  // of what this row sees
    const int begin = op.window && end > op.window ? end - op.window : 0;
    const int row_first = begin > start ? begin - start : 0, row_end = end - start < TILE ? end - start : TILE;
    if (row_first < row_end) {
      soften(s, r, size, row_first, row_end);
    } else {
      memset(s.scores + r * TILE, 0, sizeof(float) * TILE);
    }
  }
  for (r = 0; r + 3 <= num_rows; r += 3) accumulate_rows<FORMAT, 3>(s, places, r, size, first, places.count);
  if (num_rows - r == 2) accumulate_rows<FORMAT, 2>(s, places, r, size, first, places.count);
  if (num_rows - r == 1) accumulate_rows<FORMAT, 1>(s, places, r, size, first, places.count);
}

// `places` of the item's first tile are known; on return those of `next`'s first tile are.
template <Format FORMAT>
void attend(const Op& op, const Cache& cache, const Batch& batch, const AttentionItem& item, const AttentionItem* next,
            AttentionScratch& s, TilePlaces& places) {
  const int head_dim = op.head_dim, size = padded(head_dim), num_rows = item.num_queries * item.num_heads;
  const auto place_of = [&](int r) { return (item.first_head + r % item.num_heads) * head_dim; };
  for (int r = 0; r < num_rows; r++) {
    const float* const query = op.input.floats(item.first_row + r / item.num_heads) + place_of(r);
    float* const to = s.queries + r * size;
    for (int d = 0; d < head_dim; d++) to[d] = query[d] * (op.scale * 1.44269504f);  // powers of two, not of e
    for (int d = head_dim; d < size; d++) to[d] = 0;
    memset(s.outputs + r * size, 0, sizeof(float) * size);
    s.most[r] = -INFINITY;
    s.sums[r] = 0;
  }
  for (int start = item.first_tile(); start < item.end; start += TILE) {
    TilePlaces coming;
    coming.count = 0;
    if (start + TILE < item.end) {
      coming.find(op, cache, batch, item, start + TILE);
    } else if (next) {
      coming.find(op, cache, batch, *next, next->first_tile());
    }
    const int64_t token_bytes = cache.token_bytes(head_dim);
    if (size == head_dim && (FORMAT == Format::FLOAT32 || num_rows <= DIRECT_ROWS)) {
      attend_tile<FORMAT>(op, s, item, start, places, coming, token_bytes);
    } else {
      TilePlaces staged;
      staged.to_value = sizeof(float) * TILE * size;
      staged.head_dim = size;
      staged.count = places.count;
      for (int t = 0; t < TILE; t++) staged.heads[t] = reinterpret_cast<const uint8_t*>(s.tile + t * size);
      for (int t = item.first_seen > start ? item.first_seen - start : 0; t < places.count; t++) {
        read_head<FORMAT>(places.heads[t], head_dim, size, s.tile + t * size);
        read_head<FORMAT>(places.heads[t] + places.to_value, head_dim, size, s.tile + (TILE + t) * size);
      }
      attend_tile<Format::FLOAT32>(op, s, item, start, staged, coming, token_bytes);
    }
    places = coming;
  }
  for (int r = 0; r < num_rows; r++) {
    float* const from = s.outputs + r * size;
    const float inverse = 1.0f / s.sums[r];
    for (int d = 0; d < size; d += LANES) store(from + d, load(from + d) * inverse);
    const int64_t row = item.first_row + r / item.num_heads;
    if (op.output.data) memcpy(op.output.floats(row) + place_of(r), from, sizeof(float) * head_dim);
    for (int d = 0; op.quantized.data && d < head_dim; d += GROUP) {
      quantize_group(op.quantized, row, (place_of(r) + d) / GROUP, from + d);
    }
  }
}

inline void attention_chunk(const Op& op, const Cache& cache, const Batch& batch, int num_threads, int chunk, AttentionScratch& s) {
  const AttentionCut cut(op, batch, num_threads);
  const int first = int64_t{cut.num_items} * chunk / cut.num_chunks, end = int64_t{cut.num_items} * (chunk + 1) / cut.num_chunks;
  AttentionItem item = cut.item(first);
  TilePlaces places;
  places.find(op, cache, batch, item, item.first_tile());
  for (int index = first; index < end; index++) {
    const bool is_last = index + 1 == end;
    const AttentionItem next = is_last ? item : cut.item(index + 1);
    const auto attend_as = [&](auto format) {
      attend<decltype(format)::value>(op, cache, batch, item, is_last ? nullptr : &next, s, places);
    };
    switch (cache.format) {
      case Format::FLOAT32: attend_as(std::integral_constant<Format, Format::FLOAT32>()); break;
      case Format::FLOAT16: attend_as(std::integral_constant<Format, Format::FLOAT16>()); break;
      case Format::BFLOAT16: attend_as(std::integral_constant<Format, Format::BFLOAT16>()); break;
      default: attend_as(std::integral_constant<Format, Format::INT8>()); break;
    }
    item = next;
  }
}

}  // namespace weir
