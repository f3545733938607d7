// The machine's vector, as the ops of this folder see it.
//
// `Vec` holds LANES floats. Every op keeps one order of summation, whatever the number of rows: an output column is one
// lane and its products are added one after the other, or a row's sum is LANES partial sums and one tree. So a result
// depends on its own row alone, to the bit.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

namespace weir {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int32_t IntVec __attribute__((vector_size(4 * LANES)));
typedef double DoubleVec __attribute__((vector_size(8 * LANES)));
typedef float LooseVec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

INLINE Vec load(const float* from) { return *reinterpret_cast<const LooseVec*>(from); }
INLINE void store(float* to, Vec value) { *reinterpret_cast<LooseVec*>(to) = value; }
INLINE Vec splat(float value) { return value - Vec{}; }  // x - 0 is x, and the compiler knows it

INLINE float half_to_float(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16, exponent = (half >> 10) & 31, fraction = half & 1023;
  uint32_t bits;
  if (exponent == 0) {
    const float value = fraction * 0x1p-24f;
    memcpy(&bits, &value, 4);
    bits |= sign;
  } else {
    bits = sign | ((exponent == 31 ? 255 : exponent + 112) << 23) | (fraction << 13);
  }
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

INLINE uint16_t float_to_half(float value) {
#if defined(__F16C__)
  return static_cast<uint16_t>(_cvtss_sh(value, 0));
#else
  uint32_t bits;
  memcpy(&bits, &value, 4);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (bits >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (bits < 0x38800000u) {  // below the smallest normal half: a multiple of 2^-24
    float magnitude;
    memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;  // its last bit is worth 2^-24: rounds to nearest even
    memcpy(&bits, &magnitude, 4);
    return static_cast<uint16_t>(sign | (bits - 0x3f000000u));
  }
  bits += 0xfffu + ((bits >> 13) & 1);
  return static_cast<uint16_t>(sign | ((bits - 0x38000000u) >> 13));
#endif
}

INLINE float bfloat_to_float(uint16_t bfloat) {
  const uint32_t bits = uint32_t{bfloat} << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

INLINE uint16_t float_to_bfloat(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 64);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

// LANES half floats.
INLINE Vec load_half(const uint16_t* from) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__F16C__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif defined(__aarch64__)
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)));
#else
  Vec value;
  for (int lane = 0; lane < LANES; lane++) value[lane] = half_to_float(from[lane]);
  return value;
#endif
}

// LANES bfloat16s.
INLINE Vec load_bfloat(const uint16_t* from) {
  typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
  typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
  const Words words = __builtin_convertvector(*reinterpret_cast<const Halves*>(from), Words) << 16;
  return reinterpret_cast<Vec>(words);
}

// LANES integers.
INLINE Vec load_int8(const int8_t* from) {
  typedef int8_t Bytes __attribute__((vector_size(LANES), aligned(1), may_alias));
  return __builtin_convertvector(__builtin_convertvector(*reinterpret_cast<const Bytes*>(from), IntVec), Vec);
}

// 32 integers that fit into as many bytes.
INLINE void store_narrow(int8_t* to, const IntVec (&values)[32 / LANES]) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  const __m256i first = _mm256_packs_epi32(reinterpret_cast<__m256i>(values[0]), reinterpret_cast<__m256i>(values[1]));
  const __m256i second = _mm256_packs_epi32(reinterpret_cast<__m256i>(values[2]), reinterpret_cast<__m256i>(values[3]));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // packing keeps to halves of a vector
  const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(first, second), order);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bytes);
#else
  int32_t lanes[32];
  memcpy(lanes, values, sizeof lanes);
  for (int i = 0; i < 32; i++) to[i] = static_cast<int8_t>(lanes[i]);
#endif
}

// 32 integers that fit into 16 bits.
INLINE void store_narrow(int16_t* to, const IntVec (&values)[32 / LANES]) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  UNROLL for (int i = 0; i < 2; i++) {
    const __m256i halves =
        _mm256_packs_epi32(reinterpret_cast<__m256i>(values[2 * i]), reinterpret_cast<__m256i>(values[2 * i + 1]));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 16 * i), _mm256_permute4x64_epi64(halves, 0xd8));
  }
#else
  int32_t lanes[32];
  memcpy(lanes, values, sizeof lanes);
  for (int i = 0; i < 32; i++) to[i] = static_cast<int16_t>(lanes[i]);
#endif
}

// The lanes of `value` added pairwise: those half a vector apart first, neighbours last.
INLINE float sum_lanes(Vec value) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
#else
  float lanes[LANES];
  memcpy(lanes, &value, sizeof lanes);
  UNROLL for (int width = LANES / 2; width; width /= 2) {
    for (int lane = 0; lane < width; lane++) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
#endif
}

// The sums of the lanes of four vectors.
INLINE void sum_four(const Vec (&values)[4], float* sums) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(values[0], values[1]), _mm256_hadd_ps(values[2], values[3]));
  _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
#else
  UNROLL for (int i = 0; i < 4; i++) sums[i] = sum_lanes(values[i]);
#endif
}

INLINE float max_lanes(Vec value) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
#else
  float most = value[0];
  for (int lane = 1; lane < LANES; lane++) most = value[lane] > most ? value[lane] : most;
  return most;
#endif
}

INLINE Vec select(IntVec condition, Vec yes, Vec no) {
  return reinterpret_cast<Vec>((condition & reinterpret_cast<IntVec>(yes)) | (~condition & reinterpret_cast<IntVec>(no)));
}

// A bit for each lane whose condition holds.
INLINE uint32_t lanes_of(IntVec condition) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask(reinterpret_cast<__m512i>(condition));
#elif defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_ps(reinterpret_cast<__m256>(condition)));
#else
  uint32_t lanes = 0;
  UNROLL for (int lane = 0; lane < LANES; lane++) lanes |= (condition[lane] & 1u) << lane;
  return lanes;
#endif
}

INLINE Vec maximum(Vec a, Vec b) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  return _mm256_max_ps(a, b);
#else
  return select(a > b, a, b);
#endif
}

// 2^x for x of at most 0, to within two units of the last place; 0 below -125.
// Source: the first terms of the series of 2^x, between -1/2 and 1/2.
INLINE Vec power_of_two(Vec x) {
  const IntVec is_tiny = x < splat(-125.0f);
  x = maximum(x, splat(-125.0f));
  const Vec shifted = x + 12582912.0f;  // 1.5 * 2^23: the integer part lands in the low bits
  const Vec rest = x - (shifted - 12582912.0f);
  Vec sum = rest * 1.5403530e-4f + 1.3333558e-3f;
  sum = sum * rest + 9.6181291e-3f;
  sum = sum * rest + 5.5504109e-2f;
  sum = sum * rest + 2.4022651e-1f;
  sum = sum * rest + 6.9314718e-1f;
  sum = sum * rest + 1.0f;
  const IntVec result = reinterpret_cast<IntVec>(sum) + (reinterpret_cast<IntVec>(shifted) << 23);
  return reinterpret_cast<Vec>(~is_tiny & result);
}

// e^x to within two units of the last place; 0 below -87.3, and the largest power above 88.7.
// Source: Cody and Waite 1980, Software Manual for the Elementary Functions, chapter 6; a minimax polynomial of degree 6.
INLINE Vec exponential(Vec x) {
  const Vec low = splat(-87.33654f), high = splat(88.72283f);
  const IntVec is_tiny = x < low;
  x = select(x > high, high, select(is_tiny, low, x));
  const Vec scaled = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the integer part lands in the low bits
  const Vec whole = scaled - 12582912.0f;
  const Vec rest = (x - whole * 0.693145752f) - whole * 1.42860677e-6f;
  Vec sum = rest * 1.9875691e-4f + 1.3981999e-3f;
  sum = sum * rest + 8.3334519e-3f;
  sum = sum * rest + 4.1665796e-2f;
  sum = sum * rest + 1.6666666e-1f;
  sum = sum * rest + 0.5f;
  sum = sum * (rest * rest) + rest + 1.0f;
  // 2^whole in two factors, since 2^128 is none of its own.
  const IntVec power = reinterpret_cast<IntVec>(scaled) - 0x4b400000;
  const IntVec first = power >> 1, second = power - first;
  const Vec result = sum * reinterpret_cast<Vec>((first + 127) << 23) * reinterpret_cast<Vec>((second + 127) << 23);
  return select(is_tiny, Vec{}, result);
}

INLINE void prefetch(const void* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(from) + i);
}

}  // namespace weir
