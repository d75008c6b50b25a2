// Vectors of 16 lanes, written with the compiler's own vector types so that one source serves every CPU (but for AVX2,
// which has registers of half that size: pair.hpp).
//
// Owns loads, conversions, exp, log, reductions and the one instruction that matters: dp4, four 8-bit products added to
// a 32-bit lane. Surprising rule: nothing here may depend on how many rows are processed together; each row's arithmetic
// is the same in every batch, which is what makes results independent of batching.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && !defined(__AVX512F__)
#define FLARE_PAIRS
#include "pair.hpp"
#endif

namespace flare {

constexpr int LANES = 16;

#if !defined(FLARE_PAIRS)
typedef float F __attribute__((vector_size(64)));
typedef int32_t I __attribute__((vector_size(64)));
typedef uint32_t U __attribute__((vector_size(64)));
typedef uint8_t B __attribute__((vector_size(64)));
typedef _Float16 H __attribute__((vector_size(32)));
typedef uint16_t S __attribute__((vector_size(32)));
typedef int8_t C __attribute__((vector_size(16)));

template <class V> inline V load(const void *p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class V> inline void store(void *p, V v) { std::memcpy(p, &v, sizeof v); }

inline F half_to_float(const void *p) {
#if defined(__AVX512F__)
  return (F)_mm512_cvtph_ps(load<__m256i>(p)); // the compiler would convert lane by lane
#else
  return __builtin_convertvector(load<H>(p), F);
#endif
}
inline I lane_numbers() { return I{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }
inline I to_int(F v) { return __builtin_convertvector(v, I); }
template <class V> inline F to_float(V v) { return __builtin_convertvector(v, F); }
inline C to_bytes(I v) { return __builtin_convertvector(v, C); }
inline S to_words(U v) { return __builtin_convertvector(v, S); }

inline F select(I mask, F a, F b) { return (F)((mask & (I)a) | (~mask & (I)b)); }
inline F vmax(F a, F b) {
#if defined(__AVX512F__)
  return (F)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return select(a > b, a, b);
#endif
}
// Halves, then quarters, ...: the same order on every CPU.
template <class Op> inline float fold(F v, Op op) {
  float part[LANES];
  std::memcpy(part, &v, sizeof part);
#pragma GCC unroll 4
  for (int step = 8; step; step /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < step; i++) part[i] = op(part[i], part[i + step]);
  return part[0];
}
inline bool any(I mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#else
  int32_t part[LANES], all = 0;
  std::memcpy(part, &mask, sizeof part);
  for (int32_t bit : part) all |= bit;
  return all != 0;
#endif
}

// acc[i] += sum over b of w[4i + b] * four[b]: unsigned times signed bytes.
inline I dp4(I acc, B w, const int8_t *four) {
#if defined(__AVX512VNNI__)
  // The compiler would load and spread `four` by an instruction of its own, which costs a third of the speed.
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(*(const int32_t(*))four));
#else
  const int32_t a = load<int32_t>(four);
  I words = (I)w;
  for (int b = 0; b < 4; b++) acc += ((words >> (8 * b)) & 255) * (int32_t)(int8_t)(a >> (8 * b));
#endif
  return acc;
}
#endif

inline F splat(float x) { return F{} + x; }
inline I splat(int32_t x) { return I{} + x; }
inline F vabs(F a) { return (F)((I)a & 0x7fffffff); }
inline S float_to_bf16(F x) { // round to nearest, ties to even
  U u = (U)x;
  return to_words((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
inline float sum(F v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  return fold(v, [](auto a, auto b) { return a + b; });
#endif
}
inline float maximum(F v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  return fold(v, [](auto a, auto b) { return a > b ? a : b; });
#endif
}

inline F vexp(F x) { // relative error about 1e-7; 0 below -87; NaN stays NaN
  F n = (x * 1.44269504088896341f + 12582912.f) - 12582912.f;
  F r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  F p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  I live = (x > -87.0f) & (x < 88.0f);
  I exponent = (to_int(select(live, n, F{})) + 127) << 23;
  F result = p * (F)exponent;
  return select(x < 88.0f, select(live, result, F{}), x + INFINITY);
}

inline F vlog(F x) { // of normal positive numbers; relative error about 1e-7
  I bits = (I)x - 0x3f3504f3;
  F e = to_float(bits >> 23);
  F m = (F)((bits & 0x007fffff) + 0x3f3504f3) - 1.0f;
  F p = splat(7.0376836292e-2f);
  p = p * m - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  F m2 = m * m;
  F y = p * m * m2 + e * -2.12194440e-4f - 0.5f * m2;
  return m + y + e * 0.693359375f;
}

} // namespace flare
