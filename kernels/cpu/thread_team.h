// Threads that walk one list of phases together, each phase cut into chunks that whoever is free takes next.
//
// A phase is over when its chunks are done, not when every thread has arrived: a thread that the system has put aside
// between chunks holds nobody up, so that two workers can share a machine's cores. What a chunk computes depends on no
// other chunk of its phase. Waiting spins for a short while, then sleeps.
#pragma once

#include <stdint.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace weir {

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class ThreadTeam {
 public:
  // num_threads: with the caller of `run`, at least one. num_spins: pauses before a wait sleeps.
  ThreadTeam(int num_threads, int max_phases, int num_spins)
      : phases_(new Phase[max_phases]), num_spins_(num_spins), num_threads_(num_threads) {
    for (int index = 1; index < num_threads; index++) threads_.emplace_back([this, index] { serve(index); });
  }

  ~ThreadTeam() {
    is_over_.store(true);
    announce();
    for (std::thread& thread : threads_) thread.join();
  }

  int num_threads() const { return num_threads_; }

  // Do chunk(phase, index, thread) for each of num_chunks(phase) chunks, one phase after the other; returns when all
  // are done. `work` has both as methods and stays valid until then.
  template <class Work>
  void run(Work& work, int num_phases) {
    const uint32_t epoch = epoch_.load(std::memory_order_relaxed) + 1;
    for (int index = 0; index < num_phases; index++) {
      Phase& phase = phases_[index];
      phase.next.store(static_cast<uint64_t>(epoch) << 32, std::memory_order_relaxed);  // first: it shuts out who is late
      phase.num_chunks.store(work.num_chunks(index), std::memory_order_release);
      phase.num_done.store(0, std::memory_order_relaxed);
    }
    num_phases_.store(num_phases, std::memory_order_relaxed);
    work_.store(&work, std::memory_order_relaxed);
    do_chunk_.store([](void* of, int phase, int chunk, int thread) { static_cast<Work*>(of)->chunk(phase, chunk, thread); },
                    std::memory_order_relaxed);
    epoch_.store(epoch, std::memory_order_release);
    announce();
    walk(epoch, 0);
  }

 private:
  struct alignas(64) Phase {
    std::atomic<uint64_t> next{0};  // the step's epoch above, the next chunk below
    std::atomic<int32_t> num_chunks{0};
    std::atomic<int32_t> num_done{0};
  };

  void serve(int thread) {
    uint32_t last = 0;
    while (!is_over_.load()) {
      const uint32_t epoch = epoch_.load(std::memory_order_acquire);
      if (epoch != last) {
        walk(epoch, thread);
        last = epoch;
      } else {
        wait([&] { return epoch_.load(std::memory_order_acquire) != last || is_over_.load(); });
      }
    }
  }

  // A thread that comes late finds another epoch in the phases: it can take nothing and leaves.
  void walk(uint32_t epoch, int thread) {
    const int num_phases = num_phases_.load(std::memory_order_relaxed);
    void* const work = work_.load(std::memory_order_relaxed);
    const auto do_chunk = do_chunk_.load(std::memory_order_relaxed);
    for (int index = 0; index < num_phases; index++) {
      Phase& phase = phases_[index];
      uint64_t next = phase.next.load(std::memory_order_acquire);
      const int32_t num_chunks = phase.num_chunks.load(std::memory_order_acquire);  // a later step's comes with its epoch
      for (;;) {
        if (next >> 32 != epoch) return;
        if (static_cast<int32_t>(next) >= num_chunks) break;
        if (!phase.next.compare_exchange_weak(next, next + 1, std::memory_order_acquire)) continue;
        do_chunk(work, index, static_cast<int32_t>(next), thread);
        if (phase.num_done.fetch_add(1, std::memory_order_acq_rel) + 1 == num_chunks) announce();
        next = phase.next.load(std::memory_order_acquire);
      }
      wait([&] {
        return phase.num_done.load(std::memory_order_acquire) == num_chunks ||
               phase.next.load(std::memory_order_relaxed) >> 32 != epoch;
      });
    }
  }

  template <class Condition>
  void wait(Condition&& is_met) {
    for (int spin = 0; spin < num_spins_; spin++) {
      if (is_met()) return;
      relax();
    }
    for (;;) {
      const int32_t seen = news_.load();
      num_asleep_.fetch_add(1);
      if (is_met()) {
        num_asleep_.fetch_sub(1);
        return;
      }
      news_.wait(seen);
      num_asleep_.fetch_sub(1);
    }
  }

  void announce() {
    news_.fetch_add(1);
    if (num_asleep_.load()) news_.notify_all();
  }

  std::unique_ptr<Phase[]> phases_;
  const int num_spins_;
  const int num_threads_;
  std::vector<std::thread> threads_;
  alignas(64) std::atomic<uint32_t> epoch_{0};
  std::atomic<int> num_phases_{0};
  std::atomic<void*> work_{nullptr};
  std::atomic<void (*)(void*, int, int, int)> do_chunk_{nullptr};
  std::atomic<bool> is_over_{false};
  alignas(64) std::atomic<int32_t> news_{0};
  std::atomic<int32_t> num_asleep_{0};
};

}  // namespace weir
