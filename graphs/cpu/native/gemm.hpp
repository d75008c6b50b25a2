// Linear layers on 8-bit activations and 4- or 8-bit weights.
//
// Owns the activation format (groups of 32 signed bytes with a float32 scale), the weight formats (blocks of 16 outputs;
// groups of 32 inputs; float16 scales, and minima for 4 bits) and the tile that multiplies them. Surprising rule: the
// integer dot products are exact, and each row adds its groups in order, whatever rows share the tile.
#pragma once
#include "vec.hpp"
#include <utility>

namespace flare {

constexpr int GROUP = 32, TILE = 16, CHAINS = 4;

// Weights: per block of 16 outputs, `groups` x codes, then `groups` x scales (16 float16, and 16 minima for nibbles).
// Codes of a group are 8 steps of 4 inputs; a step is 16 outputs x 4 bytes. Nibbles: byte chunk j holds step j in its
// low and step j + 4 in its high half, w = scale * q + minimum. Bytes: w = scale * (q - 128).
struct Linear {
  const uint8_t *data;
  const float *bias;
  int64_t blocks, groups, nibble;

  int64_t codes_bytes() const { return nibble ? 256 : 512; }
  int64_t scales_bytes() const { return nibble ? 64 : 32; }
  int64_t block_bytes() const { return (groups * (codes_bytes() + scales_bytes()) + 63) / 64 * 64; }
};

// Activations of some rows, in tiles of 16 rows: [tile][group][row], each 32 codes, with the group's scale, scale * sum of
// codes, and -128 * sum. Within a tile every row lies at a fixed distance, so that one pointer serves all of them.
struct Activations {
  int8_t *codes;
  float *scale, *scaled_sum;
  int32_t *correction;
  int groups;

  int64_t at(int row, int g) const { return ((int64_t)(row / TILE) * groups + g) * TILE + row % TILE; }

  // Quantize 32 values to group g of a row.
  void put(int row, int g, F a, F b) const {
    float top = maximum(vmax(vabs(a), vabs(b)));
    float inverse = top > 0 ? 127.0f / top : 0.0f;
    F ra = a * inverse, rb = b * inverse;
    ra = (ra + 12582912.f) - 12582912.f; // round to nearest even
    rb = (rb + 12582912.f) - 12582912.f;
    I ia = __builtin_convertvector(ra, I), ib = __builtin_convertvector(rb, I);
    int64_t to_group = at(row, g);
    int8_t *to = codes + to_group * GROUP;
    store(to, __builtin_convertvector(ia, C));
    store(to + LANES, __builtin_convertvector(ib, C));
    float total = sum(ra + rb); // a whole number; NaN if an input is not finite, and then so is the scale
    scale[to_group] = top / 127.0f + 0.0f * total;
    scaled_sum[to_group] = top / 127.0f * total;
    correction[to_group] = -128 * (int)total;
  }
};

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
        acc[r0 + c] += (__builtin_convertvector(dot[c], F) * in_scale[r0 + c]) * scale;
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

using Tile = void (*)(const Linear &, int64_t, const Activations &, int, F *);

template <bool NIBBLE, int... R> constexpr auto tile_table(std::integer_sequence<int, R...>) {
  struct Table {
    Tile of[sizeof...(R)];
  };
  return Table{{&tile<R + 1, NIBBLE>...}};
}

// Multiply rows [first, last) with one block, giving each (row, 16 outputs) to `take`.
template <class Take> inline void multiply(const Linear &w, int64_t block, const Activations &x, int first, int last, Take take) {
  static constexpr auto nibbles = tile_table<true>(std::make_integer_sequence<int, TILE>{});
  static constexpr auto bytes = tile_table<false>(std::make_integer_sequence<int, TILE>{});
  const Tile *of = w.nibble ? nibbles.of : bytes.of;
  F out[TILE];
  for (int from = first, to; from < last; from = to) {
    to = (from / TILE + 1) * TILE < last ? (from / TILE + 1) * TILE : last;
    of[to - from - 1](w, block, x, from, out);
    for (int r = from; r < to; r++) take(r, out[r - from]);
  }
}

// One row of weights as floats: an embedding.
inline void weight_row(const Linear &w, int64_t output, float *to) {
  const uint8_t *codes = w.data + output / LANES * w.block_bytes();
  const uint8_t *scales = codes + w.groups * w.codes_bytes();
  int lane = output % LANES;
  for (int64_t g = 0; g < w.groups; g++) {
    float scale = load<_Float16>(scales + 2 * lane), minimum = w.nibble ? (float)load<_Float16>(scales + 32 + 2 * lane) : 0;
    for (int k = 0; k < GROUP; k++) {
      int step = k / 4, byte = 4 * lane + k % 4;
      if (w.nibble) {
        int q = codes[64 * (step % 4) + byte] >> (step < 4 ? 0 : 4) & 15;
        to[g * GROUP + k] = scale * (float)q + minimum;
      } else {
        to[g * GROUP + k] = scale * (float)((int)codes[64 * step + byte] - 128);
      }
    }
    codes += w.codes_bytes();
    scales += w.scales_bytes();
  }
}

} // namespace flare
