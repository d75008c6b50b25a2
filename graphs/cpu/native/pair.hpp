// The vectors of vec.hpp on CPUs whose registers hold 32 bytes (AVX2): pairs of them.
//
// Owns the pair's operators, which are those of the compiler's own vectors, and what else vec.hpp promises of its types.
// Surprising rule: the compiler has vectors wider than a register, too, but keeps them in memory and converts them lane
// by lane: ten times slower.
#pragma once
#include <cstdint>
#include <cstring>
#include <immintrin.h>

namespace flare {

template <class T> struct Pair {
  typedef T Half __attribute__((vector_size(32)));
  Half low, high;

  Pair() = default;
  Pair(Half l, Half h) : low(l), high(h) {}
  Pair(T x) : low{x, x, x, x, x, x, x, x}, high(low) {}
  template <class Bits> explicit Pair(Pair<Bits> of) : low((Half)of.low), high((Half)of.high) {}
  T operator[](int i) const { return i < 8 ? low[i] : high[i - 8]; }

  friend Pair operator-(Pair a) { return {-a.low, -a.high}; }
  friend Pair operator~(Pair a) { return {~a.low, ~a.high}; }
  friend Pair operator<<(Pair a, int bits) { return {a.low << bits, a.high << bits}; }
  friend Pair operator>>(Pair a, int bits) { return {a.low >> bits, a.high >> bits}; }
#define LANE_BY_LANE(op) \
  friend Pair operator op(Pair a, Pair b) { return {a.low op b.low, a.high op b.high}; } \
  friend Pair &operator op##=(Pair &a, Pair b) { return a = a op b; }
  LANE_BY_LANE(+)
  LANE_BY_LANE(-)
  LANE_BY_LANE(*)
  LANE_BY_LANE(/)
  LANE_BY_LANE(&)
  LANE_BY_LANE(|)
  LANE_BY_LANE(^)
#undef LANE_BY_LANE
#define COMPARISON(op) \
  friend Pair<int32_t> operator op(Pair a, Pair b) { return {a.low op b.low, a.high op b.high}; }
  COMPARISON(<)
  COMPARISON(<=)
  COMPARISON(>)
  COMPARISON(>=)
  COMPARISON(!=)
#undef COMPARISON
};

typedef Pair<float> F;
typedef Pair<int32_t> I;
typedef Pair<uint32_t> U;
typedef uint16_t S __attribute__((vector_size(32)));
typedef int8_t C __attribute__((vector_size(16)));

template <class V> inline V load(const void *p) {
  if constexpr (requires(V v) { v.low; }) {
    return {load<typename V::Half>(p), load<typename V::Half>((const char *)p + 32)};
  } else {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
  }
}
template <class V> inline void store(void *p, V v) { std::memcpy(p, &v, sizeof v); }
template <class T> inline void store(void *p, Pair<T> v) {
  store(p, v.low);
  store((char *)p + 32, v.high);
}

inline I lane_numbers() { return {I::Half{0, 1, 2, 3, 4, 5, 6, 7}, I::Half{8, 9, 10, 11, 12, 13, 14, 15}}; }
inline I to_int(F v) { return {__builtin_convertvector(v.low, I::Half), __builtin_convertvector(v.high, I::Half)}; }
template <class T> inline F to_float(Pair<T> v) {
  return {__builtin_convertvector(v.low, F::Half), __builtin_convertvector(v.high, F::Half)};
}
inline C to_bytes(I v) { // of numbers that fit
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)v.low, (__m256i)v.high), 0xd8);
  return (C)_mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}
inline S to_words(U v) { // of numbers that fit
  return (S)_mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)v.low, (__m256i)v.high), 0xd8);
}

inline F::Half select(I::Half mask, F::Half a, F::Half b) {
  return (F::Half)_mm256_blendv_ps((__m256)b, (__m256)a, (__m256)mask);
}
inline F select(I mask, F a, F b) { return {select(mask.low, a.low, b.low), select(mask.high, a.high, b.high)}; }
inline F vmax(F a, F b) {
  return {(F::Half)_mm256_max_ps((__m256)a.low, (__m256)b.low), (F::Half)_mm256_max_ps((__m256)a.high, (__m256)b.high)};
}
inline bool any(I mask) {
  const __m256i both = (__m256i)(mask.low | mask.high);
  return !_mm256_testz_si256(both, both);
}

// Halves, then quarters, ...
template <class Op> inline float fold(F v, Op op) {
  const __m256 eight = op((__m256)v.low, (__m256)v.high);
  const __m128 four = op(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = op(four, _mm_movehl_ps(four, four));
  return op(two, _mm_movehdup_ps(two))[0];
}

} // namespace flare
