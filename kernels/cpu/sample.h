// The body of `kernels/sample.py` on a CPU: one token out of a row of scores, by one number between 0 and 1.
//
// Weights are floats against the best token's 1, their sums doubles in one order. Only the tokens that can be among the
// kept ones are sorted: a histogram over the upper bits of the weights says from which weight on.
#pragma once

#include <algorithm>
#include <vector>

#include "step.h"

namespace weir {

struct SampleRow {
  const float* scores;  // [vocabulary]
  double temperature, min_p, top_p, uniform;
  int32_t top_k;  // less than the vocabulary; 0 for all
  int32_t token;  // the result; -1 where the best score is not finite or one is no number
};

struct SampleScratch {
  std::vector<float> weights;
  std::vector<double> sums;  // of each block of weights
  std::vector<int32_t> counts, kept;
  std::vector<double> bucket_sums;
};

constexpr int WEIGHT_SHIFT = 19;  // a bucket is an exponent and four bits of fraction
constexpr int NUM_BUCKETS = (0x3f800000 >> WEIGHT_SHIFT) + 2;  // weights are at most 1, or a bit more by rounding
constexpr int SUM_BLOCK = 256;

INLINE int bucket_of(float weight) {
  int32_t bits;
  memcpy(&bits, &weight, 4);
  const int bucket = bits >> WEIGHT_SHIFT;
  return bucket < NUM_BUCKETS ? bucket : NUM_BUCKETS - 1;
}

// The best of the scores, or a value that is not finite.
INLINE float best_score(const float* scores, int count) {
  Vec most = splat(-INFINITY);
  IntVec is_no_number = IntVec{};
  int i = 0;
  for (; i + LANES <= count; i += LANES) {
    const Vec score = load(scores + i);
    is_no_number |= score != score;
    most = maximum(most, score);
  }
  float best = -INFINITY;
  for (int lane = 0; lane < LANES; lane++) {
    if (is_no_number[lane]) return NAN;
    best = most[lane] > best ? most[lane] : best;
  }
  for (; i < count; i++) {
    if (scores[i] != scores[i]) return NAN;
    best = scores[i] > best ? scores[i] : best;
  }
  return best;
}

// Sums of SUM_BLOCK weights each; returns the sum of all.
inline double sum_blocks(const std::vector<float>& weights, std::vector<double>& sums) {
  const int count = static_cast<int>(weights.size());
  double total = 0;
  sums.clear();
  for (int first = 0; first < count; first += SUM_BLOCK) {
    const int end = first + SUM_BLOCK < count ? first + SUM_BLOCK : count;
    double parts[8] = {};
    int i = first;
    for (; i + 8 <= end; i += 8) {
      UNROLL for (int part = 0; part < 8; part++) parts[part] += weights[i + part];
    }
    for (; i < end; i++) parts[0] += weights[i];
    sums.push_back(((parts[0] + parts[4]) + (parts[1] + parts[5])) + ((parts[2] + parts[6]) + (parts[3] + parts[7])));
    total += sums.back();
  }
  return total;
}

// The first token, in the order of the ids, at which the running sum exceeds `target`; where rounding keeps every sum
// from doing so, the last token of any weight.
inline int draw_of_all(const SampleScratch& s, double target) {
  const int count = static_cast<int>(s.weights.size());
  double sum = 0;
  size_t block = 0;
  while (block + 1 < s.sums.size() && sum + s.sums[block] <= target) sum += s.sums[block++];
  int token = static_cast<int>(block) * SUM_BLOCK;
  for (; token < count; token++) {
    sum += s.weights[token];
    if (sum > target && s.weights[token] > 0) return token;
  }
  do token--; while (token > 0 && !(s.weights[token] > 0));
  return token;
}

inline int draw_of_kept(const SampleRow& row, SampleScratch& s, double total) {
  const std::vector<float>& weights = s.weights;
  const int count = static_cast<int>(weights.size());
  s.counts.assign(NUM_BUCKETS, 0);
  s.bucket_sums.assign(NUM_BUCKETS, 0);
  for (int i = 0; i < count; i++) {
    const int bucket = bucket_of(weights[i]);
    s.counts[bucket]++;
    s.bucket_sums[bucket] += weights[i];
  }
  const double share = row.top_p * total * (1 + 1e-9);  // of no consequence but for rounding
  int64_t num_above = 0;
  double sum_above = 0;
  int floor = NUM_BUCKETS;
  while (floor > 0 && (num_above == 0 || (row.top_k ? num_above < row.top_k : sum_above <= share))) {
    floor--;
    num_above += s.counts[floor];
    sum_above += s.bucket_sums[floor];
  }
  if (floor > 0) floor--;  // two weights may lie in the wrong order by the last bit
  s.kept.clear();
  for (int i = 0; i < count; i++) {
    if (bucket_of(weights[i]) >= floor) s.kept.push_back(i);
  }
  const float* const scores = row.scores;
  std::stable_sort(s.kept.begin(), s.kept.end(), [scores](int32_t a, int32_t b) { return scores[a] > scores[b]; });
  if (row.top_k && static_cast<int64_t>(s.kept.size()) > row.top_k) s.kept.resize(row.top_k);
  if (row.top_k) {
    total = 0;
    for (const int32_t token : s.kept) total += weights[token];
  }
  // A token is kept while those before it do not make up top-p yet; so the first always is.
  double kept_total = 0;
  size_t num_kept = 0;
  while (num_kept < s.kept.size() && (num_kept == 0 || row.top_p >= 1 || kept_total < row.top_p * total)) {
    kept_total += weights[s.kept[num_kept++]];
  }
  const double target = kept_total * row.uniform;
  double sum = 0;
  int32_t last = s.kept[0];
  for (size_t i = 0; i < num_kept; i++) {
    sum += weights[s.kept[i]];
    if (weights[s.kept[i]] > 0) last = s.kept[i];
    if (sum > target) break;
  }
  return last;
}

inline void sample_row(SampleRow& row, int count, SampleScratch& s) {
  const float best = best_score(row.scores, count);
  row.token = -1;
  if (!__builtin_isfinite(best)) return;
  s.weights.resize(count);
  const float inverse = static_cast<float>(1.0 / (row.temperature > 1e-30 ? row.temperature : 1e-30));
  const float min_p = static_cast<float>(row.min_p < 1 ? row.min_p : 1);  // the best token is always left
  const auto weigh = [&](const float* scores) {
    const Vec weight = exponential((load(scores) - best) * inverse);
    return select(weight >= min_p, weight, Vec{});
  };
  int i = 0;
  for (; i + LANES <= count; i += LANES) store(&s.weights[i], weigh(row.scores + i));
  if (i < count) {
    float scores[LANES] = {}, weights[LANES];
    memcpy(scores, row.scores + i, sizeof(float) * (count - i));
    store(weights, weigh(scores));
    memcpy(&s.weights[i], weights, sizeof(float) * (count - i));
  }
  const double total = sum_blocks(s.weights, s.sums);
  row.token = row.top_k || row.top_p < 1 ? draw_of_kept(row, s, total) : draw_of_all(s, total * row.uniform);
}

}  // namespace weir
