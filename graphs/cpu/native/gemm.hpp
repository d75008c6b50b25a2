// Linear layers on 8-bit activations and 4- or 8-bit weights.
//
// Owns the tile that multiplies some rows with a block of weights, and the choice of it. Surprising rule: the integer dot
// products are exact, and each row adds its groups in order, whatever rows share the tile.
#pragma once
#include "gemm_avx2.hpp"
#include "linear.hpp"
#include <utility>

namespace flare {

#if !defined(FLARE_GEMM_AVX2)
constexpr int HEIGHT = TILE, CHAINS = 4;

// out[r] = dot products of rows row..row+R-1, all of one tile, with the 16 outputs of a block.
template <int R, bool NIBBLE> inline void tile(const Linear &w, int64_t block, const Activations &x, int row, F *out) {
  const int groups = x.groups;
  const uint8_t *codes = w.data + block * w.block_bytes();
  const uint8_t *scales = codes + groups * w.codes_bytes();
  const int64_t at = x.at(row, 0);
  const int8_t *in = x.codes + at * GROUP;
  const float *in_scale = x.scale + at, *in_sum = x.scaled_sum + at;
  const int32_t *correction = x.correction + at;
  const B low = B{} + (uint8_t)15;
  F acc[R];
  for (int r = 0; r < R; r++) acc[r] = F{};
  for (int g = 0; g < groups; g++) {
    B q[8];
#pragma GCC unroll 8
    for (int j = 0; j < (NIBBLE ? 4 : 8); j++) {
      B raw = load<B>(codes + 64 * j);
      if (NIBBLE) {
        q[j] = raw & low;
        q[j + 4] = (B)((U)raw >> 4) & low;
      } else {
        q[j] = raw;
      }
    }
    const F scale = half_to_float(scales), minimum = NIBBLE ? half_to_float(scales + 32) : F{};
#pragma GCC unroll 16
    for (int r0 = 0; r0 < R; r0 += CHAINS) { // a few rows at a time, to hide the latency of each one's chain
      I dot[CHAINS];
#pragma GCC unroll 4
      for (int c = 0; c < CHAINS && r0 + c < R; c++) dot[c] = NIBBLE ? I{} : splat(correction[r0 + c]);
#pragma GCC unroll 8
      for (int j = 0; j < 8; j++)
#pragma GCC unroll 4
        for (int c = 0; c < CHAINS && r0 + c < R; c++) dot[c] = dp4(dot[c], q[j], in + (r0 + c) * GROUP + 4 * j);
#pragma GCC unroll 4
      for (int c = 0; c < CHAINS && r0 + c < R; c++) {
        acc[r0 + c] += (to_float(dot[c]) * in_scale[r0 + c]) * scale;
        if (NIBBLE) acc[r0 + c] += minimum * in_sum[r0 + c];
      }
    }
    codes += w.codes_bytes();
    scales += w.scales_bytes();
    in += TILE * GROUP;
    in_scale += TILE;
    in_sum += TILE;
    correction += TILE;
  }
  F bias = w.bias ? load<F>(w.bias + block * LANES) : F{};
  for (int r = 0; r < R; r++) out[r] = acc[r] + bias;
}

#endif

using Tile = void (*)(const Linear &, int64_t, const Activations &, int, F *);

template <bool NIBBLE, int... R> constexpr auto tile_table(std::integer_sequence<int, R...>) {
  struct Table {
    Tile of[sizeof...(R)];
  };
  return Table{{&tile<R + 1, NIBBLE>...}};
}

// Multiply rows [first, last) with one block, giving each (row, 16 outputs) to `take`.
template <class Take> inline void multiply(const Linear &w, int64_t block, const Activations &x, int first, int last, Take take) {
  static constexpr auto nibbles = tile_table<true>(std::make_integer_sequence<int, HEIGHT>{});
  static constexpr auto bytes = tile_table<false>(std::make_integer_sequence<int, HEIGHT>{});
  const Tile *of = w.nibble ? nibbles.of : bytes.of;
  F out[HEIGHT];
  for (int from = first, to; from < last; from = to) {
    to = (from / HEIGHT + 1) * HEIGHT < last ? (from / HEIGHT + 1) * HEIGHT : last;
    of[to - from - 1](w, block, x, from, out);
    for (int r = from; r < to; r++) take(r, out[r - from]);
  }
}

} // namespace flare
