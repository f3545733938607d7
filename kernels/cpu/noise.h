// The random numbers of `kernels/noise.py`: those of a group of 64 tokens, made of 16 blocks of four words each.
#pragma once

#include <math.h>

#include "simd.h"

namespace weir {

constexpr int NOISE_GROUP = 64;
constexpr int NOISE_LANES = 16;
constexpr double MAX_NOISE = 22.9;  // that of word 0 is 22.88

typedef uint32_t Words __attribute__((vector_size(4 * LANES)));

// The upper halves of the products of LANES words with one.
INLINE Words multiply_high(Words a, uint32_t factor) {
  Words high;
#if defined(__AVX512F__)
  const __m512i factors = _mm512_set1_epi32(static_cast<int>(factor)), values = reinterpret_cast<__m512i>(a);
  const __m512i even = _mm512_mul_epu32(values, factors);
  const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(values, 32), factors);
  high = reinterpret_cast<Words>(_mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd));
#elif defined(__AVX2__)
  const __m256i factors = _mm256_set1_epi32(static_cast<int>(factor)), values = reinterpret_cast<__m256i>(a);
  const __m256i even = _mm256_mul_epu32(values, factors);
  const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(values, 32), factors);
  high = reinterpret_cast<Words>(_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa));
#else
  for (int lane = 0; lane < LANES; lane++) high[lane] = static_cast<uint32_t>(uint64_t{a[lane]} * factor >> 32);
#endif
  return high;
}

constexpr int NOISE_PARTS = NOISE_LANES / LANES;

// Philox 4x32-10, of all blocks of a group at once: a round waits for its products, which others can use.
// Source: Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3.
INLINE void philox(Words (&words)[4][NOISE_PARTS], uint64_t key) {
  uint32_t first = static_cast<uint32_t>(key), second = static_cast<uint32_t>(key >> 32);
  UNROLL for (int round = 0; round < 10; round++) {
    UNROLL for (int part = 0; part < NOISE_PARTS; part++) {
      const Words a = words[0][part], b = words[2][part];
      words[0][part] = multiply_high(b, 0xcd9e8d57u) ^ words[1][part] ^ first;
      words[1][part] = b * 0xcd9e8d57u;
      words[2][part] = multiply_high(a, 0xd2511f53u) ^ words[3][part] ^ second;
      words[3][part] = a * 0xd2511f53u;
    }
    first += 0x9e3779b9u;
    second += 0xbb67ae85u;
  }
}

// The words of the group's tokens, in their order.
INLINE void noise_words(uint64_t seed, uint32_t position, uint32_t choice, int group, Words (&words)[4][NOISE_PARTS]) {
  uint32_t blocks[NOISE_LANES];
  for (int lane = 0; lane < NOISE_LANES; lane++) blocks[lane] = static_cast<uint32_t>(group * NOISE_LANES + lane);
  UNROLL for (int part = 0; part < NOISE_PARTS; part++) {
    memcpy(&words[0][part], blocks + part * LANES, sizeof(Words));
    words[1][part] = Words{} + position;
    words[2][part] = Words{} + choice;
    words[3][part] = Words{};
  }
  philox(words, seed);
}

inline double gumbel(uint32_t word) { return -log(-log(1 - (word + 0.5) * 0x1p-32)); }

// At least `gumbel`, and at most 0.06 more where that is above 3: -log(-log(1 - u)) is at most -log(u), and the bits of a
// float, as a number, are at most its logarithm.
INLINE Vec most_noise(Words words) {
  const Vec floats = __builtin_convertvector(reinterpret_cast<IntVec>(words >> 1), Vec);
  const Vec bits = __builtin_convertvector(reinterpret_cast<IntVec>(floats), Vec);
  return splat(158 * 0.693147181f + 1e-4f) - bits * (0.693147181f * 0x1p-23f);
}

}  // namespace weir
