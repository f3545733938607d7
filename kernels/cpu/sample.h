// The body of `kernels/sample.py` on a CPU: one token out of a row of scores.
//
// Noise is made for groups of tokens that hold one that can still win, and logarithms are taken for those alone whose
// noise is high enough. What top-k and top-p keep is found by a histogram of the
// tokens that can be kept at all and a partition of one bucket.
#pragma once

#include <algorithm>
#include <vector>

#include "noise.h"
#include "step.h"

namespace weir {

struct SampleRow {
  const float* scores;  // [vocabulary]
  double temperature;   // 0 for the best score
  double min_p, top_p;
  uint64_t seed;
  uint32_t position, choice;
  int32_t top_k;  // less than the vocabulary; 0 for all
  int32_t token;  // the result; -1 where the best score is not finite or one is no number
};

// A token of some measure: its weight, or 1 where tokens are counted.
struct Candidate {
  float score;
  int32_t token;
  double measure;

  bool operator<(const Candidate& other) const {  // the better one is less
    return score > other.score || (score == other.score && token < other.token);
  }
};

constexpr int NUM_BUCKETS = 1024;
constexpr float BUCKETS_PER_NAT = 8;

struct SampleScratch {
  std::vector<float> most, sorted;  // the best score of each group
  std::vector<Candidate> candidates;
  double measures[NUM_BUCKETS];
  float tail[NOISE_GROUP];
};

// The scores of a row by groups of NOISE_GROUP; the last one is filled up with minus infinity.
struct Groups {
  const float* scores;
  const float* tail;
  int count, num_tokens;

  Groups(const float* row, int num_tokens, float (&filled)[NOISE_GROUP])
      : scores(row), tail(filled), count(ceil_div(num_tokens, NOISE_GROUP)), num_tokens(num_tokens) {
    const int first = (count - 1) * NOISE_GROUP;
    for (int i = 0; i < NOISE_GROUP; i++) filled[i] = first + i < num_tokens ? row[first + i] : -INFINITY;
  }

  const float* operator[](int group) const { return group + 1 < count ? scores + group * NOISE_GROUP : tail; }
};

// Fills in the best score of every group; returns that of all, or no number.
INLINE float find_best(const Groups& groups, std::vector<float>& most) {
  most.resize(groups.count);
  IntVec is_no_number = IntVec{};
  float best = -INFINITY;
  for (int group = 0; group < groups.count; group++) {
    const float* const scores = groups[group];
    Vec highest = load(scores);
    UNROLL for (int i = 0; i < NOISE_GROUP; i += LANES) {
      const Vec score = load(scores + i);
      is_no_number |= score != score;
      highest = maximum(highest, score);
    }
    most[group] = max_lanes(highest);
    best = most[group] > best ? most[group] : best;
  }
  for (int lane = 0; lane < LANES; lane++) best = is_no_number[lane] ? NAN : best;
  return best;
}

// The least token that may be chosen: those of higher scores may, too, and those of its score with lower ids.
struct Least {
  float score;
  int32_t token;
};

// Finds the tokens that may be chosen, each step among those that are left.
class Selection {
 public:
  Selection(const Groups& groups, float best, double temperature, SampleScratch& scratch)
      : groups_(groups), best_(best), temperature_(temperature), inverse_(static_cast<float>(1 / temperature)), s_(scratch) {}

  Least least() const { return least_; }

  void keep_weights(double min_p) {
    if (min_p > 0) raise(static_cast<float>(best_ + temperature_ * log(min_p < 1 ? min_p : 1)));
  }

  void keep_best(int count) {
    if (count <= groups_.count) {  // as many tokens have at least the score of that group's best
      s_.sorted = s_.most;
      std::nth_element(s_.sorted.begin(), s_.sorted.begin() + (count - 1), s_.sorted.end(), std::greater<float>());
      raise(s_.sorted[count - 1]);
    }
    keep_share(count, [](float) { return 1; });
  }

  void keep_likeliest(double top_p) {
    const double share = top_p > 0 ? top_p : 0;
    double total = 0;
    if (least_.score > -INFINITY) {
      visit([](Vec score) { return score == score; }, [&](float, int, float weight, int) { total += weight; });
    } else {
      total = raise_to_share(share);
    }
    keep_share(share * total, [](float weight) { return weight; });
  }

 private:
  void raise(float score) { least_.score = std::max(least_.score, score); }

  Vec weigh(Vec score) const { return exponential((score - best_) * inverse_); }

  // The weight of all tokens; leaves fewer of them, but those that hold the share of it.
  double raise_to_share(double share) {
    constexpr int NUM_FLOORS = 6;
    Vec floors[NUM_FLOORS];
    double above[NUM_FLOORS] = {};
    DoubleVec totals = DoubleVec{};  // a share of one half is decided by the least of weights, where two are the best
    for (int i = 0; i < NUM_FLOORS; i++) floors[i] = splat(static_cast<float>(best_ - 2 * (i + 1) * temperature_));
    for (int group = 0; group < groups_.count; group++) {
      Vec sums[NUM_FLOORS] = {};
      UNROLL for (int i = 0; i < NOISE_GROUP; i += LANES) {
        const Vec score = load(groups_[group] + i), weight = weigh(score);
        totals += __builtin_convertvector(weight, DoubleVec);
        UNROLL for (int j = 0; j < NUM_FLOORS; j++) sums[j] += select(score >= floors[j], weight, Vec{});
      }
      for (int j = 0; j < NUM_FLOORS; j++) above[j] += sum_lanes(sums[j]);
    }
    double total = 0;
    for (int lane = 0; lane < LANES; lane++) total += totals[lane];
    // Tokens below the mean of what may be left out make up less than that.
    raise(static_cast<float>(best_ + temperature_ * (log((1 - share) * total / groups_.num_tokens) - 1e-3)));
    for (int i = 0; i < NUM_FLOORS; i++) {
      if (above[i] > share * total * (1 + 1e-6)) raise(floors[i][0]);
    }
    return total;
  }

  // A better token's bucket is no higher.
  IntVec bucket_of(Vec score) const {
    const Vec distance = (best_ - score) * (inverse_ * BUCKETS_PER_NAT), last = splat(NUM_BUCKETS - 1);
    return __builtin_convertvector(select(distance < last, distance, last), IntVec);
  }

  IntVec is_left(Vec score) const { return (score >= splat(least_.score)) & (score > splat(-INFINITY)); }

  // Calls with (score, token, weight, bucket) for each token that is left and meets the condition. Where they are is
  // found for a whole group at once, since one cannot guess whether the next is one.
  template <class Condition, class Visitor>
  void visit(Condition&& condition, Visitor&& visitor) const {
    for (int group = 0; group < groups_.count; group++) {
      if (s_.most[group] < least_.score) continue;
      const float* const scores = groups_[group];
      uint64_t places = 0;
      UNROLL for (int i = 0; i < NOISE_GROUP; i += LANES) {
        const Vec score = load(scores + i);
        places |= uint64_t{lanes_of(is_left(score) & condition(score))} << i;
      }
      if (!places) continue;
      float weights[NOISE_GROUP];
      int32_t buckets[NOISE_GROUP];
      UNROLL for (int i = 0; i < NOISE_GROUP; i += LANES) {
        const IntVec bucket = bucket_of(load(scores + i));
        store(weights + i, weigh(load(scores + i)));
        memcpy(buckets + i, &bucket, sizeof bucket);
      }
      for (; places; places &= places - 1) {
        const int place = __builtin_ctzll(places), token = group * NOISE_GROUP + place;
        if (scores[place] > least_.score || token <= least_.token) {
          visitor(scores[place], token, weights[place], buckets[place]);
        }
      }
    }
  }

  // Keep the best tokens, as few as have a share of the measure. Only those of the bucket at the border are put in order.
  template <class Measure>
  void keep_share(double share, Measure&& measure) {
    std::fill_n(s_.measures, NUM_BUCKETS, 0.0);
    int last = 0;
    visit([](Vec score) { return score == score; }, [&](float, int, float weight, int bucket) {
      s_.measures[bucket] += measure(weight);
      last = std::max(last, bucket);
    });
    double before = 0;
    int border = 0;
    while (border < last && before + s_.measures[border] < share) before += s_.measures[border++];
    std::vector<Candidate>& all = s_.candidates;
    all.clear();
    visit([&](Vec score) { return bucket_of(score) == border; },
          [&](float score, int token, float weight, int) {
            all.push_back({score, token, static_cast<double>(measure(weight))});
          });
    size_t first = 0, end = all.size();  // the last that is kept is one of these
    while (end - first > 1) {
      const size_t middle = first + (end - first) / 2;
      std::nth_element(all.begin() + first, all.begin() + middle, all.begin() + end);
      double sum = before;
      for (size_t i = first; i < middle; i++) sum += all[i].measure;
      if (sum < share) {
        before = sum;
        first = middle;
      } else {
        end = middle;
      }
    }
    least_ = {all[first].score, all[first].token};
  }

  const Groups& groups_;
  const float best_;
  const double temperature_;
  const float inverse_;
  SampleScratch& s_;
  Least least_{-INFINITY, INT32_MAX};
};

// The tokens so far in the race for the highest sum of score and noise.
class Race {
 public:
  Race(const SampleRow& row, float best, Least least)
      : row_(row), best_(best), least_(least), inverse_(static_cast<float>(1 / row.temperature)) {}

  int winner() const { return winner_; }

  // Scores below cannot win any more, whatever their noise.
  double lowest() const { return std::max<double>(least_.score, best_ + (top_ - MAX_NOISE) * row_.temperature); }

  void enter(int group, const float* scores, float most) {
    Words words[4][NOISE_PARTS];
    noise_words(row_.seed, row_.position, row_.choice, group, words);
    const Vec top = splat(static_cast<float>(top_) - 1e-3f);
    Words lowest = words[0][0];  // of the most noise
    UNROLL for (int i = 1; i < NOISE_GROUP / LANES; i++) {
      const Words other = words[i / NOISE_PARTS][i % NOISE_PARTS];
      lowest = other < lowest ? other : lowest;
    }
    if (!lanes_of((most - best_) * inverse_ + most_noise(lowest) >= top)) return;
    UNROLL for (int i = 0; i < NOISE_GROUP / LANES; i++) {
      const Words own = words[i / NOISE_PARTS][i % NOISE_PARTS];
      const Vec score = load(scores + i * LANES);
      const Vec sum = (score - best_) * inverse_ + most_noise(own);
      for (uint32_t lanes = lanes_of((score >= splat(least_.score)) & (sum >= top)); lanes; lanes &= lanes - 1) {
        const int lane = __builtin_ctz(lanes);
        enter(group * NOISE_GROUP + i * LANES + lane, score[lane], own[lane]);
      }
    }
  }

 private:
  __attribute__((noinline)) void enter(int token, float score, uint32_t word) {
    if (score == least_.score && token > least_.token) return;
    const double sum = (static_cast<double>(score) - best_) / row_.temperature + gumbel(word);
    if (sum > top_ || (sum == top_ && token < winner_)) {
      top_ = sum;
      winner_ = token;
    }
  }

  const SampleRow& row_;
  const float best_;
  const Least least_;
  const float inverse_;
  double top_ = -INFINITY;
  int winner_ = -1;
};

inline void sample_row(SampleRow& row, int num_tokens, SampleScratch& s) {
  const Groups groups(row.scores, num_tokens, s.tail);
  const float best = find_best(groups, s.most);
  row.token = -1;
  if (!__builtin_isfinite(best)) return;
  const int first = static_cast<int>(std::find(s.most.begin(), s.most.end(), best) - s.most.begin());
  if (row.temperature == 0) {
    row.token = first * NOISE_GROUP + static_cast<int>(std::find(groups[first], groups[first] + NOISE_GROUP, best) - groups[first]);
    return;
  }
  Selection selection(groups, best, row.temperature, s);
  selection.keep_weights(row.min_p);
  if (row.top_k > 0) selection.keep_best(row.top_k);
  if (row.top_p < 1) selection.keep_likeliest(row.top_p);
  Race race(row, best, selection.least());
  race.enter(first, groups[first], best);  // whose sum is a hard one to beat
  for (int group = 0; group < groups.count; group++) {
    if (group != first && s.most[group] >= race.lowest()) race.enter(group, groups[group], s.most[group]);
  }
  row.token = race.winner();
}

}  // namespace weir
