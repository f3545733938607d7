// The library's face: what `library.py` calls. Plain C: no exception leaves it, and the caller owns all memory it passes.
#include <math.h>

#include <memory>
#include <vector>

#include "attention.h"
#include "linear.h"
#include "pack.h"
#include "rms_norm.h"
#include "rotate_and_store.h"
#include "sample.h"
#include "thread_team.h"

namespace weir {

constexpr int ROWS_PER_CHUNK = 16;

// A plan with the threads that run it.
class Runner {
 public:
  Runner(const Op* ops, int num_ops, const Cache& cache, int num_threads, int num_spins)
      : ops_(ops, ops + num_ops), cache_(cache), team_(num_threads, num_ops, num_spins), scratch_(num_threads) {
    int columns = 0, head_dim = 0;
    for (const Op& op : ops_) {
      columns = op.input.columns > columns ? op.input.columns : columns;
      head_dim = op.head_dim > head_dim ? op.head_dim : head_dim;
    }
    const int size = padded(head_dim);
    for (Scratch& scratch : scratch_) {
      scratch.row.resize(ceil_div(columns, GROUP) * GROUP);
      scratch.memory.resize((2 * MAX_ROWS + 2 * TILE) * size);
      scratch.attention = std::make_unique<AttentionScratch>();
      scratch.attention->queries = scratch.memory.data();
      scratch.attention->outputs = scratch.attention->queries + MAX_ROWS * size;
      scratch.attention->tile = scratch.attention->outputs + MAX_ROWS * size;
    }
  }

  void run(const Batch& batch) {
    batch_ = &batch;
    team_.run(*this, static_cast<int>(ops_.size()));
  }

  // Fills in the tokens of `rows`, each of `num_scores` scores.
  void sample(SampleRow* rows, int num_rows, int num_scores) {
    struct Work {
      SampleRow* rows;
      int num_rows, num_scores;
      std::vector<Scratch>& scratch;
      int num_chunks(int) const { return num_rows; }
      void chunk(int, int row, int thread) { sample_row(rows[row], num_scores, scratch[thread].sample); }
    } work{rows, num_rows, num_scores, scratch_};
    team_.run(work, 1);
  }

  int num_chunks(int phase) const {
    const Op& op = ops_[phase];
    switch (op.kind) {
      case Kind::LINEAR: return LinearCut(op, *batch_, team_.num_threads()).num_chunks();
      case Kind::ATTENTION: return AttentionCut(op, *batch_, team_.num_threads()).num_chunks;
      default: return ceil_div(num_rows(op, *batch_), ROWS_PER_CHUNK);
    }
  }

  void chunk(int phase, int chunk, int thread) {
    const Op& op = ops_[phase];
    Scratch& scratch = scratch_[thread];
    if (op.kind == Kind::LINEAR) return linear_chunk(op, *batch_, team_.num_threads(), chunk);
    if (op.kind == Kind::ATTENTION) {
      return attention_chunk(op, cache_, *batch_, team_.num_threads(), chunk, *scratch.attention);
    }
    const int first = chunk * ROWS_PER_CHUNK, rows = num_rows(op, *batch_);
    for (int row = first; row < rows && row < first + ROWS_PER_CHUNK; row++) do_row(op, row, scratch.row.data());
  }

 private:
  struct Scratch {
    std::vector<float> row, memory;
    std::unique_ptr<AttentionScratch> attention;
    SampleScratch sample;
  };

  void do_row(const Op& op, int row, float* scratch) const {
    switch (op.kind) {
      case Kind::EMBEDDING: return unpack_row(op.matrix, static_cast<int>(batch_->input_ids[row]), op.output.floats(row));
      case Kind::RMS_NORM: return rms_norm_row(op, *batch_, row, scratch);
      case Kind::QUANTIZE: return quantize_row(op.output, row, op.input.floats(row));
      case Kind::ROTATE_AND_STORE: return rotate_and_store_row(op, cache_, *batch_, row);
      default: return;  // LINEAR and ATTENTION are cut otherwise
    }
  }

  const std::vector<Op> ops_;
  const Cache cache_;
  const Batch* batch_ = nullptr;
  ThreadTeam team_;
  std::vector<Scratch> scratch_;
};

}  // namespace weir

using namespace weir;

#define EXPORT __attribute__((visibility("default")))

extern "C" {

// Sizes of Buffer, Matrix, Op, Cache, Batch and SampleRow.
EXPORT void weir_struct_sizes(int64_t* sizes) {
  const int64_t all[] = {sizeof(Buffer), sizeof(Matrix), sizeof(Op), sizeof(Cache), sizeof(Batch), sizeof(SampleRow)};
  memcpy(sizes, all, sizeof all);
}

EXPORT int64_t weir_panel_bytes(int32_t format, int32_t num_inputs) { return panel_bytes(static_cast<Format>(format), num_inputs); }

// rows: one pointer for each output, null for a row of zeros; sources: what each points to; panels: to be filled.
EXPORT void weir_pack(int32_t format, const uint8_t* const* rows, const uint8_t* sources, int32_t num_outputs, int32_t num_inputs,
               uint8_t* panels) {
  const int64_t bytes = panel_bytes(static_cast<Format>(format), num_inputs);
  for (int first = 0; first < num_outputs; first += PANEL, panels += bytes) {
    const uint8_t* panel_rows[PANEL] = {};
    Source panel_sources[PANEL] = {};
    for (int i = 0; i < PANEL && first + i < num_outputs; i++) {
      panel_rows[i] = rows[first + i];
      panel_sources[i] = static_cast<Source>(sources[first + i]);
    }
    pack_panel(static_cast<Format>(format), panel_rows, panel_sources, num_inputs, panels);
  }
}

EXPORT void weir_unpack_row(const Matrix* matrix, int32_t output, float* row) { unpack_row(*matrix, output, row); }

EXPORT void* weir_runner_create(const Op* ops, int32_t num_ops, const Cache* cache, int32_t num_threads, int32_t num_spins) {
  return new Runner(ops, num_ops, *cache, num_threads, num_spins);
}

EXPORT void weir_runner_run(void* runner, const Batch* batch) { static_cast<Runner*>(runner)->run(*batch); }

EXPORT void weir_runner_sample(void* runner, SampleRow* rows, int32_t num_rows, int32_t num_scores) {
  static_cast<Runner*>(runner)->sample(rows, num_rows, num_scores);
}

EXPORT void weir_runner_destroy(void* runner) { delete static_cast<Runner*>(runner); }
}
