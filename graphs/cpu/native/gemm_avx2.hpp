// The tile of gemm.hpp by instructions on 32 bytes (AVX2), for CPUs that have no VNNI on 64.
//
// Owns the dot products of up to four rows with a block of 16 outputs, in two halves. Surprising rule: the products of a
// whole group are summed in 16 bits before they are widened, which codes of four bits cannot overflow
// (16 * 15 * 128 < 2^15); a byte is therefore taken as two such codes.
#pragma once
#include "linear.hpp"
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && !defined(__AVX512VNNI__)
#define FLARE_GEMM_AVX2

namespace flare {

constexpr int HEIGHT = 4;

struct Halves {
  __m256i low, high; // of 16 outputs
};

// sums[i] += the products of codes[i], four bytes for each output, with `four`; `widened` completes them. Left alone, the
// compiler spreads the bytes of all rows first, and has no registers for them.
inline void dot(Halves &sums, Halves codes, const int8_t *four) {
  __m256i spread, products;
#if defined(__AVXVNNI__)
  asm("vpbroadcastd %6, %2\n\t%{vex%} vpdpbusd %2, %4, %0\n\t%{vex%} vpdpbusd %2, %5, %1"
#else
  asm("vpbroadcastd %6, %2\n\tvpmaddubsw %2, %4, %3\n\tvpmaddubsw %2, %5, %2\n\tvpaddw %3, %0, %0\n\tvpaddw %2, %1, %1"
#endif
      : "+x"(sums.low), "+x"(sums.high), "=&x"(spread), "=&x"(products)
      : "x"(codes.low), "x"(codes.high), "m"(*(const int32_t(*))four));
}
template <int SHIFT> inline __m256i widened(__m256i sums) {
#if defined(__AVXVNNI__)
  return _mm256_slli_epi32(sums, SHIFT);
#else
  return _mm256_madd_epi16(sums, _mm256_set1_epi16(1 << SHIFT));
#endif
}
inline __m256 halves_to_floats(const uint8_t *p) { return _mm256_cvtph_ps(load<__m128i>(p)); }

// out[r] = dot products of rows row..row+R-1, all of one tile, with the 16 outputs of a block.
template <int R, bool NIBBLE> inline void tile(const Linear &w, int64_t block, const Activations &x, int row, F *out) {
  const uint8_t *codes = w.data + block * w.block_bytes();
  const uint8_t *scales = codes + x.groups * w.codes_bytes();
  const int64_t at = x.at(row, 0);
  const int8_t *in = x.codes + at * GROUP;
  const float *in_scale = x.scale + at, *in_sum = x.scaled_sum + at;
  const int32_t *correction = x.correction + at;
  const __m256i four_bits = _mm256_set1_epi8(15), zero = _mm256_setzero_si256();
  __m256 acc[R][2];
  for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = _mm256_setzero_ps();
  for (int g = 0; g < x.groups; g++) {
    Halves sums[R], tops[R]; // `tops` of the upper four bits of bytes
    for (int r = 0; r < R; r++) sums[r] = tops[r] = {zero, zero};
#pragma GCC unroll 8
    for (int j = 0; j < (NIBBLE ? 4 : 8); j++) {
      const __m256i a = load<__m256i>(codes + 64 * j), b = load<__m256i>(codes + 64 * j + 32);
      const Halves lower = {a & four_bits, b & four_bits};
      const Halves upper = {_mm256_srli_epi16(a, 4) & four_bits, _mm256_srli_epi16(b, 4) & four_bits};
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        const int8_t *four = in + r * GROUP + 4 * j;
        dot(sums[r], lower, four);
        if (NIBBLE) dot(sums[r], upper, four + 16);
        else dot(tops[r], upper, four);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
      for (int half = 0; half < 2; half++) {
        __m256i total = widened<0>(half ? sums[r].high : sums[r].low);
        if (!NIBBLE) {
          total = _mm256_add_epi32(total, widened<4>(half ? tops[r].high : tops[r].low));
          total = _mm256_add_epi32(total, _mm256_set1_epi32(correction[r]));
        }
        const __m256 product = _mm256_cvtepi32_ps(total) * _mm256_set1_ps(in_scale[r]);
        acc[r][half] = _mm256_fmadd_ps(product, halves_to_floats(scales + 16 * half), acc[r][half]);
        if (NIBBLE)
          acc[r][half] = _mm256_fmadd_ps(halves_to_floats(scales + 32 + 16 * half), _mm256_set1_ps(in_sum[r]), acc[r][half]);
      }
    codes += w.codes_bytes();
    scales += w.scales_bytes();
    in += TILE * GROUP;
    in_scale += TILE;
    in_sum += TILE;
    correction += TILE;
  }
  const F bias = w.bias ? load<F>(w.bias + block * LANES) : F{};
  for (int r = 0; r < R; r++) out[r] = load<F>(acc[r]) + bias;
}

} // namespace flare
#endif
