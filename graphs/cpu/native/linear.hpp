// The formats of linear layers: 8-bit activations and 4- or 8-bit weights.
//
// Owns the activation format (groups of 32 signed bytes with a float32 scale) and the weight formats (blocks of 16
// outputs; groups of 32 inputs; float16 scales, and minima for 4 bits). Surprising rule: both are laid out for dot
// products of four bytes at a time, and are the same on every CPU.
#pragma once
#include "vec.hpp"

namespace flare {

constexpr int GROUP = 32, TILE = 16;

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
    int64_t to_group = at(row, g);
    int8_t *to = codes + to_group * GROUP;
    store(to, to_bytes(to_int(ra)));
    store(to + LANES, to_bytes(to_int(rb)));
    float total = sum(ra + rb); // a whole number; NaN if an input is not finite, and then so is the scale
    scale[to_group] = top / 127.0f + 0.0f * total;
    scaled_sum[to_group] = top / 127.0f * total;
    correction[to_group] = -128 * (int)total;
  }
};

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
