// What this machine can do at most: bytes read and multiply-adds a second, by `num_threads` threads.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

typedef float Vec __attribute__((vector_size(32)));
typedef int64_t IntVec __attribute__((vector_size(32)));

template <class Body>
static double seconds(int num_threads, Body&& body) {
  std::atomic<int> waiting{num_threads};
  std::vector<std::thread> threads;
  std::vector<double> taken(num_threads);
  for (int index = 0; index < num_threads; index++) {
    threads.emplace_back([&, index] {
      waiting--;
      while (waiting) {}
      const auto start = std::chrono::steady_clock::now();
      body(index);
      taken[index] = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    });
  }
  double longest = 0;
  for (int index = 0; index < num_threads; index++) {
    threads[index].join();
    longest = taken[index] > longest ? taken[index] : longest;
  }
  return longest;
}

extern "C" double bytes_per_second(int num_threads) {
  const size_t size = size_t{192} << 20;
  std::vector<char*> memory(num_threads);
  for (char*& each : memory) {
    each = static_cast<char*>(aligned_alloc(64, size));
    memset(each, 1, size);
  }
  double best = 1e9;
  for (int repeat = 0; repeat < 5; repeat++) {
    const double taken = seconds(num_threads, [&](int index) {
      const IntVec* const from = reinterpret_cast<const IntVec*>(memory[index]);
      IntVec sums[8] = {};
      for (size_t i = 0; i < size / 32; i += 8) {
        for (int lane = 0; lane < 8; lane++) sums[lane] += from[i + lane];
      }
      for (int lane = 0; lane < 8; lane++) asm volatile("" : : "x"(sums[lane]));
    });
    best = taken < best ? taken : best;
  }
  for (char* each : memory) free(each);
  return num_threads * static_cast<double>(size) / best;
}

extern "C" double multiply_adds_per_second(int num_threads) {
  const int64_t rounds = 20000000;
  double best = 1e9;
  for (int repeat = 0; repeat < 5; repeat++) {
    const double taken = seconds(num_threads, [&](int) {
      Vec sums[10];
      for (Vec& sum : sums) sum = Vec{} + 1.0f;
      Vec factor = Vec{} + 1.0000001f, step = Vec{} + 1e-7f;
      asm volatile("" : "+x"(factor), "+x"(step));
      for (int64_t round = 0; round < rounds / 10; round++) {
        for (Vec& sum : sums) sum = sum * factor + step;
      }
      for (Vec& sum : sums) asm volatile("" : : "x"(sum));
    });
    best = taken < best ? taken : best;
  }
  return num_threads * static_cast<double>(rounds) * 8 / best;
}
