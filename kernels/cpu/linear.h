// The body of `kernels/linear.py` on a CPU: rows times a packed matrix, with what follows it done on the way out.
//
// Every product of an output is added in the order of the inputs, whatever the number of rows, so a row's result does
// not depend on its neighbours. A tile is a few rows times one panel: its sums stay in registers.
#pragma once

#include "integer_dot.h"
#include "pack.h"
#include "step.h"

namespace weir {

constexpr int FLOAT_TILE = LANES == 16 ? 12 : LANES == 8 ? 6 : 5;  // rows
constexpr int INTEGER_TILE = LANES == 16 ? 8 : 4;
constexpr int BLOCK_BYTES = 192 << 10;  // of input rows that stay in a core's own cache while panels pass by
constexpr int CHUNKS_PER_THREAD = 4;
constexpr int PREFETCH_BYTES = 2048;  // how far ahead of the products weights are fetched

template <Format FORMAT>
INLINE Vec load_weights(const uint8_t* panel, int index) {
  if constexpr (FORMAT == Format::FLOAT32) return load(reinterpret_cast<const float*>(panel) + index);
  if constexpr (FORMAT == Format::FLOAT16) return load_half(reinterpret_cast<const uint16_t*>(panel) + index);
  return load_bfloat(reinterpret_cast<const uint16_t*>(panel) + index);
}

template <Format FORMAT, int R>
INLINE void multiply_floats(const uint8_t* panel, int num_inputs, const Buffer& input, int64_t row, Vec (&sums)[R][VECS]) {
  const float* const x = input.floats(row);
  const int64_t stride = input.stride / 4;
  constexpr int SIZE = FORMAT == Format::FLOAT32 ? 4 : 2;
  for (int i = 0; i < num_inputs; i++) {
    prefetch(panel + i * PANEL * SIZE + PREFETCH_BYTES, 1);
    Vec weights[VECS];
    UNROLL for (int v = 0; v < VECS; v++) weights[v] = load_weights<FORMAT>(panel, i * PANEL + v * LANES);
    UNROLL for (int r = 0; r < R; r++) {
      const Vec value = splat(x[r * stride + i]);
      UNROLL for (int v = 0; v < VECS; v++) sums[r][v] += value * weights[v];
    }
  }
}

template <int R>
INLINE void multiply_int8(const uint8_t* panel, int num_inputs, const Buffer& input, int64_t row, Vec (&sums)[R][VECS]) {
  const int16_t* x = input.integers<int16_t>(row);
  const float* scales = input.scales(row);
  const int64_t stride = input.stride / 4;
  for (int left = num_inputs; left > 0; left -= GROUP, x += GROUP, scales++, panel += INT8_GROUP_BYTES) {
    prefetch(panel + PREFETCH_BYTES, INT8_GROUP_BYTES);
    IntVec products[R][VECS];
    dot_int8<R>(panel, x, input.stride, products);
    const uint16_t* const halves = reinterpret_cast<const uint16_t*>(panel + INT8_BYTES);
    UNROLL for (int v = 0; v < VECS; v++) {
      const Vec weight_scale = load_half(halves + v * LANES);
      UNROLL for (int r = 0; r < R; r++) {
        sums[r][v] += __builtin_convertvector(products[r][v], Vec) * (weight_scale * scales[r * stride]);
      }
    }
  }
}

template <int R>
INLINE void multiply_int4(const uint8_t* panel, int num_inputs, const Buffer& input, int64_t row, Vec (&sums)[R][VECS]) {
  const int8_t* x = input.integers<int8_t>(row);
  const float* scales = input.scales(row);
  const int64_t stride = input.stride / 4, num_groups = num_inputs / GROUP;
  for (int left = num_inputs; left > 0; left -= GROUP, x += GROUP, scales++, panel += INT4_GROUP_BYTES) {
    prefetch(panel + PREFETCH_BYTES, INT4_GROUP_BYTES);
    IntVec products[R][VECS];
    dot_int4<R>(panel, x, input.stride, products);
    const uint16_t* const halves = reinterpret_cast<const uint16_t*>(panel + INT4_BYTES);
    UNROLL for (int v = 0; v < VECS; v++) {
      const Vec weight_scale = load_half(halves + v * LANES), offset = load_half(halves + PANEL + v * LANES);
      UNROLL for (int r = 0; r < R; r++) {
        sums[r][v] += offset * scales[r * stride + num_groups];
        sums[r][v] += __builtin_convertvector(products[r][v], Vec) * (weight_scale * scales[r * stride]);
      }
    }
  }
}

// Outputs that come of one panel.
INLINE int width_of(const Op& op) { return op.is_gated ? PANEL / 2 : PANEL; }

// Bias, gate, sum with the residual, and the way into the output's rows.
template <int R>
INLINE void finish_tile(const Op& op, int panel, int64_t row, Vec (&sums)[R][VECS]) {
  const int width = width_of(op);
  const int first = panel * width, left = op.output.columns - first;
  const int count = left < width ? left : width;
  UNROLL for (int r = 0; r < R; r++) {
    float values[PANEL];
    UNROLL for (int v = 0; v < VECS; v++) {
      Vec sum = sums[r][v];
      if (op.second_weight) sum += load(op.second_weight + panel * PANEL + v * LANES);
      store(values + v * LANES, sum);
    }
    if (op.is_gated) {
      float gates[PANEL];
      UNROLL for (int i = 0; i < PANEL / 2; i += LANES) {
        const Vec value = load(values + i);
        store(gates + i, value / (1.0f + exponential(-value)));
      }
      UNROLL for (int i = 0; i < PANEL / 2; i++) values[i] = gates[i] * values[PANEL / 2 + i];
    }
    float* const to = op.output.floats(row + r) + first;
    const float* const from = op.residual.data ? op.residual.floats(row + r) + first : nullptr;
    int i = 0;
    for (; i + LANES <= count; i += LANES) store(to + i, from ? load(from + i) + load(values + i) : load(values + i));
    for (; i < count; i++) to[i] = from ? from[i] + values[i] : values[i];
  }
}

template <int R>
__attribute__((noinline)) void linear_tile(const Op& op, int panel, int64_t row) {
  const uint8_t* const weights = op.matrix.panels + panel * op.matrix.panel_bytes;
  const int num_inputs = op.matrix.num_inputs;
  Vec sums[R][VECS];
  UNROLL for (int r = 0; r < R; r++) {
    UNROLL for (int v = 0; v < VECS; v++) sums[r][v] = Vec{};
  }
  if constexpr (R <= INTEGER_TILE) {
    if (op.matrix.format == Format::INT8) multiply_int8<R>(weights, num_inputs, op.input, row, sums);
    if (op.matrix.format == Format::INT4) multiply_int4<R>(weights, num_inputs, op.input, row, sums);
  }
  if (op.matrix.format == Format::FLOAT32) multiply_floats<Format::FLOAT32, R>(weights, num_inputs, op.input, row, sums);
  if (op.matrix.format == Format::FLOAT16) multiply_floats<Format::FLOAT16, R>(weights, num_inputs, op.input, row, sums);
  if (op.matrix.format == Format::BFLOAT16) multiply_floats<Format::BFLOAT16, R>(weights, num_inputs, op.input, row, sums);
  finish_tile<R>(op, panel, row, sums);
}

template <int R = FLOAT_TILE>
INLINE void linear_tile_of(int rows, const Op& op, int panel, int64_t row) {
  if (rows == R) return linear_tile<R>(op, panel, row);
  if constexpr (R > 1) linear_tile_of<R - 1>(rows, op, panel, row);
}

// How a linear op is cut: blocks of rows times runs of panels, all rows of one run before the next.
struct LinearCut {
  int tile, unit, num_row_blocks, num_units, num_runs;  // a run is whole units of panels

  LinearCut(const Op& op, const Batch& batch, int num_threads) {
    unit = op.quantized.data ? GROUP / width_of(op) : 1;
    const int rows = num_rows(op, batch);
    tile = op.input.rows == Rows::FLOAT32 ? FLOAT_TILE : INTEGER_TILE;
    const int block = static_cast<int>(BLOCK_BYTES / op.input.stride) / tile * tile;
    num_row_blocks = ceil_div(rows, block > tile ? block : tile);
    num_units = ceil_div(op.matrix.num_outputs, PANEL) / unit;
    const int wanted = num_row_blocks > 1 ? num_units * unit / 16 + 1 : num_threads > 1 ? CHUNKS_PER_THREAD * num_threads : 1;
    num_runs = wanted < num_units ? wanted : num_units;
  }

  int num_chunks() const { return num_row_blocks * num_runs; }
};

inline void linear_chunk(const Op& op, const Batch& batch, int num_threads, int chunk) {
  const LinearCut cut(op, batch, num_threads);
  const int64_t rows = num_rows(op, batch);
  const int run = chunk / cut.num_row_blocks, block = chunk % cut.num_row_blocks;
  const int first_row = rows * block / cut.num_row_blocks, last_row = rows * (block + 1) / cut.num_row_blocks;
  const int num_tiles = ceil_div(last_row - first_row, cut.tile);
  const int last_panel = int64_t{cut.num_units} * (run + 1) / cut.num_runs * cut.unit;
  for (int panel = int64_t{cut.num_units} * run / cut.num_runs * cut.unit; panel < last_panel; panel++) {
    for (int tile = 0; tile < num_tiles; tile++) {
      const int row = first_row + (last_row - first_row) * tile / num_tiles;
      const int end = first_row + (last_row - first_row) * (tile + 1) / num_tiles;
      linear_tile_of(end - row, op, panel, row);
    }
    if (op.quantized.data && (panel + 1) % cut.unit == 0) {
      const int group = panel / cut.unit;
      for (int row = first_row; row < last_row; row++) {
        quantize_group(op.quantized, row, group, op.output.floats(row) + group * GROUP);
      }
    }
  }
}

}  // namespace weir
