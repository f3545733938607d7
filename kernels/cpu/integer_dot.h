// Exact sums of products over one group of 32 inputs, for the 16 outputs of a panel and R rows.
#pragma once

#include "step.h"

namespace weir {

constexpr int VECS = PANEL / LANES;  // vectors that hold one value for each output of a panel

// The compiler would otherwise reorder the additions and keep every product on the stack.
#if defined(__x86_64__)
#define KEEP_ORDER(value) asm("" : "+x"(value))
#else
#define KEEP_ORDER(value) asm("" : "+w"(value))
#endif

// `x`: R rows of 32 INT8 values, `stride` bytes apart.
template <int R>
INLINE void dot_int4(const uint8_t* group, const int8_t* x, int64_t stride, IntVec (&sums)[R][VECS]) {
#if defined(__AVX512VNNI__)
  __m512i total[R];
  UNROLL for (int r = 0; r < R; r++) total[r] = _mm512_setzero_si512();
  UNROLL for (int step = 0; step < 8; step++) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(group + 32 * step));
    const __m256i mask = _mm256_set1_epi8(15);
    const __m512i weights = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_and_si256(bytes, mask)),
                                               _mm256_and_si256(_mm256_srli_epi16(bytes, 4), mask), 1);
    UNROLL for (int r = 0; r < R; r++) {
      int32_t four;
      memcpy(&four, x + r * stride + 4 * step, 4);
      total[r] = _mm512_dpbusd_epi32(total[r], weights, _mm512_set1_epi32(four));
      asm("" : "+v"(total[r]));
    }
  }
  UNROLL for (int r = 0; r < R; r++) sums[r][0] = reinterpret_cast<IntVec>(total[r]);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  __m256i pairs[R][2];  // 16 bits hold eight sums of two products: 8 * 2 * 15 * 127 = 30,480
  UNROLL for (int r = 0; r < R; r++) pairs[r][0] = pairs[r][1] = _mm256_setzero_si256();
  const __m256i mask = _mm256_set1_epi8(15);
  UNROLL for (int step = 0; step < 8; step++) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(group + 32 * step));
    const __m256i low = _mm256_and_si256(bytes, mask), high = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), mask);
    UNROLL for (int r = 0; r < R; r++) {
      int32_t four;
      memcpy(&four, x + r * stride + 4 * step, 4);
      const __m256i inputs = _mm256_set1_epi32(four);
      pairs[r][0] = _mm256_add_epi16(pairs[r][0], _mm256_maddubs_epi16(low, inputs));
      pairs[r][1] = _mm256_add_epi16(pairs[r][1], _mm256_maddubs_epi16(high, inputs));
      KEEP_ORDER(pairs[r][0]);
      KEEP_ORDER(pairs[r][1]);
    }
  }
  const __m256i ones = _mm256_set1_epi16(1);
  UNROLL for (int r = 0; r < R; r++) {
    sums[r][0] = reinterpret_cast<IntVec>(_mm256_madd_epi16(pairs[r][0], ones));
    sums[r][1] = reinterpret_cast<IntVec>(_mm256_madd_epi16(pairs[r][1], ones));
  }
#elif defined(__ARM_FEATURE_DOTPROD)
  UNROLL for (int r = 0; r < R; r++) {
    UNROLL for (int v = 0; v < VECS; v++) sums[r][v] = IntVec{};
  }
  UNROLL for (int step = 0; step < 8; step++) {
    const uint8x16_t first = vld1q_u8(group + 32 * step), second = vld1q_u8(group + 32 * step + 16);
    const uint8x16_t mask = vdupq_n_u8(15);
    const int8x16_t weights[4] = {
        vreinterpretq_s8_u8(vandq_u8(first, mask)), vreinterpretq_s8_u8(vandq_u8(second, mask)),
        vreinterpretq_s8_u8(vshrq_n_u8(first, 4)), vreinterpretq_s8_u8(vshrq_n_u8(second, 4))};
    UNROLL for (int r = 0; r < R; r++) {
      int32_t four;
      memcpy(&four, x + r * stride + 4 * step, 4);
      const int8x16_t inputs = vreinterpretq_s8_s32(vdupq_n_s32(four));
      UNROLL for (int v = 0; v < 4; v++) {
        sums[r][v] = reinterpret_cast<IntVec>(vdotq_s32(reinterpret_cast<int32x4_t>(sums[r][v]), weights[v], inputs));
      }
    }
  }
#else
  for (int r = 0; r < R; r++) {
    int32_t total[PANEL] = {};
    for (int i = 0; i < GROUP; i++) {
      const uint8_t* const bytes = group + i / 4 * 32 + i % 4;
      for (int output = 0; output < 8; output++) {
        total[output] += (bytes[4 * output] & 15) * x[r * stride + i];
        total[8 + output] += (bytes[4 * output] >> 4) * x[r * stride + i];
      }
    }
    memcpy(sums[r], total, sizeof total);
  }
#endif
}

// `x`: R rows of 32 INT16 values, `stride` bytes apart.
template <int R>
INLINE void dot_int8(const uint8_t* group, const int16_t* x, int64_t stride, IntVec (&sums)[R][VECS]) {
  const uint8_t* const bytes = reinterpret_cast<const uint8_t*>(x);
#if defined(__AVX512BW__)
  __m512i total[R];
  UNROLL for (int r = 0; r < R; r++) total[r] = _mm512_setzero_si512();
  UNROLL for (int step = 0; step < 16; step++) {
    const __m512i weights =
        _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(group + 32 * step)));
    UNROLL for (int r = 0; r < R; r++) {
      int32_t two;
      memcpy(&two, bytes + r * stride + 4 * step, 4);
#if defined(__AVX512VNNI__)
      total[r] = _mm512_dpwssd_epi32(total[r], weights, _mm512_set1_epi32(two));
#else
      total[r] = _mm512_add_epi32(total[r], _mm512_madd_epi16(weights, _mm512_set1_epi32(two)));
#endif
      asm("" : "+v"(total[r]));
    }
  }
  UNROLL for (int r = 0; r < R; r++) sums[r][0] = reinterpret_cast<IntVec>(total[r]);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  __m256i total[R][2];
  UNROLL for (int r = 0; r < R; r++) total[r][0] = total[r][1] = _mm256_setzero_si256();
  UNROLL for (int step = 0; step < 16; step++) {
    const __m128i* const pair = reinterpret_cast<const __m128i*>(group + 32 * step);
    const __m256i first = _mm256_cvtepi8_epi16(_mm_loadu_si128(pair));
    const __m256i second = _mm256_cvtepi8_epi16(_mm_loadu_si128(pair + 1));
    UNROLL for (int r = 0; r < R; r++) {
      int32_t two;
      memcpy(&two, bytes + r * stride + 4 * step, 4);
      const __m256i inputs = _mm256_set1_epi32(two);
      total[r][0] = _mm256_add_epi32(total[r][0], _mm256_madd_epi16(first, inputs));
      total[r][1] = _mm256_add_epi32(total[r][1], _mm256_madd_epi16(second, inputs));
      KEEP_ORDER(total[r][0]);
      KEEP_ORDER(total[r][1]);
    }
  }
  UNROLL for (int r = 0; r < R; r++) {
    sums[r][0] = reinterpret_cast<IntVec>(total[r][0]);
    sums[r][1] = reinterpret_cast<IntVec>(total[r][1]);
  }
#else
  const int8_t* const weights = reinterpret_cast<const int8_t*>(group);
  for (int r = 0; r < R; r++) {
    int32_t total[PANEL] = {};
    for (int i = 0; i < GROUP; i += 2) {
      int16_t two[2];
      memcpy(two, bytes + r * stride + 2 * i, 4);
      for (int output = 0; output < PANEL; output++) {
        total[output] += weights[i * PANEL + 2 * output] * two[0] + weights[i * PANEL + 2 * output + 1] * two[1];
      }
    }
    memcpy(sums[r], total, sizeof total);
  }
#endif
}

}  // namespace weir
