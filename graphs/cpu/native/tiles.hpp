// The same attention by matrix tiles (AMX), on CPUs that have them.
//
// Owns the tile unit's permission and configuration, and attention of up to TILE_QUERIES queries by products of bfloat16
// tiles summed in float32. Surprising rule: a decoding row goes through the same tiles as a prompt's, mostly empty ones,
// since a tile's sums differ from those of other instructions in the last bit.
#pragma once
#include "attention.hpp"
#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512F__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define FLARE_TILES
#endif

namespace flare {

constexpr int TILE_QUERIES = 16;

#ifdef FLARE_TILES

// Whether the system lets this process use tiles: it saves their state only for those who have asked.
inline bool tiles_permitted() {
  constexpr long REQUEST = 0x1023, TILE_DATA = 18; // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

// One thread's tiles for as long as this lives: all eight of 16 rows of 64 bytes.
class TileUnit {
public:
  explicit TileUnit(bool used) : used_(used) {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } layout;
    for (int i = 0; i < 8; i++) layout.row_bytes[i] = 64, layout.rows[i] = 16;
    if (used_) _tile_loadconfig(&layout);
  }
  ~TileUnit() {
    if (used_) _tile_release();
  }
  TileUnit(const TileUnit &) = delete;
  TileUnit &operator=(const TileUnit &) = delete;

private:
  bool used_;
};

// exp of numbers up to 0, as near as bfloat16 can tell; 0 far below, and NaN stays NaN.
inline F exp_coarse(F x) {
  const __m512 t = _mm512_max_ps((__m512)splat(-150.0f), (__m512)(x * 1.44269504088896341f));
  const __m512 n = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const F r = (F)t - (F)n;
  F p = splat(9.6181291e-3f);
  p = p * r + 5.5504109e-2f;
  p = p * r + 2.4022651e-1f;
  p = p * r + 6.9314718e-1f;
  p = p * r + 1.0f;
  return (F)_mm512_scalef_ps((__m512)p, n);
}

// Scores of 16 queries (bfloat16 [16][head_dim]) with the keys of P pages; scores [page][16][PAGE].
template <int P> inline void score_tiles(const PagedHead &kv, const int32_t *pages, int head_dim, const uint16_t *queries, float *scores) {
  _tile_zero(0);
  _tile_zero(1);
  if (P == 2) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int d = 0; d < head_dim; d += 2 * LANES) {
    const uint16_t *k = kv.keys + pages[0] * kv.stride + d * PAGE;
    _tile_loadd(4, queries + d, 2 * head_dim);
    _tile_loadd(5, k, 4 * PAGE);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, k + 2 * LANES, 4 * PAGE);
    _tile_dpbf16ps(1, 4, 6);
    if (P == 2) {
      k = kv.keys + pages[1] * kv.stride + d * PAGE;
      _tile_loadd(5, k, 4 * PAGE);
      _tile_dpbf16ps(2, 4, 5);
      _tile_loadd(6, k + 2 * LANES, 4 * PAGE);
      _tile_dpbf16ps(3, 4, 6);
    }
  }
  _tile_stored(0, scores, 4 * PAGE);
  _tile_stored(1, scores + LANES, 4 * PAGE);
  if (P == 2) {
    _tile_stored(2, scores + TILE_QUERIES * PAGE, 4 * PAGE);
    _tile_stored(3, scores + TILE_QUERIES * PAGE + LANES, 4 * PAGE);
  }
}

// The largest scores so far of each query, lane by lane, with those of one page; -inf in place of what is not seen.
inline void mask_page(float *scores, int page, const Seen<TILE_QUERIES> &seen, int queries, F *top) {
  const I lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const int begin = page * PAGE;
  for (int i = 0; i < queries; i++, scores += PAGE) {
    F a = load<F>(scores), b = load<F>(scores + LANES);
    if (begin <= seen.first[i] || begin + PAGE - 1 > seen.last[i]) {
      const I j = lane + begin, k = j + LANES;
      a = select((j > seen.first[i]) & (j <= seen.last[i]), a, splat(-INFINITY));
      b = select((k > seen.first[i]) & (k <= seen.last[i]), b, splat(-INFINITY));
      store(scores, a);
      store(scores + LANES, b);
    }
    top[i] = vmax(vmax(top[i], a), b);
  }
}

// Turn one page's scores into exponentials, in bfloat16 at the beginning of each row, and add them to the sums.
inline void soften_page(float *scores, int queries, const float *peak, F *sums) {
  for (int i = 0; i < queries; i++, scores += PAGE) {
    const F a = exp_coarse(load<F>(scores) - peak[i]), b = exp_coarse(load<F>(scores + LANES) - peak[i]);
    store(scores, float_to_bf16(a));
    store(scores + LANES / 2, float_to_bf16(b));
    sums[i] += a;
    sums[i] += b;
  }
}

// The last page's values in V vectors of dimensions, with zeros for keys that nobody has stored.
template <int V> inline void copy_seen(const uint16_t *values, int here, int head_dim, U (*to)[4]) {
  for (int j = 0; j < PAGE; j += 2)
    for (int v = 0; v < V; v++) {
      const U pair = load<U>(values + j * head_dim + 2 * v * LANES);
      to[j / 2][v] = j + 1 < here ? pair : j < here ? pair & 0xffffu : U{};
    }
}

// Add one page's values, mixed by the exponentials, to tiles 0 to V - 1; `here` of its keys are stored.
template <int V> inline void mix_page(const uint16_t *values, int here, int head_dim, const float *scores) {
  alignas(64) U tail[PAGE / 2][4];
  int64_t stride = 4 * head_dim;
  if (here < PAGE) {
    copy_seen<V>(values, here, head_dim, tail);
    values = (const uint16_t *)tail;
    stride = sizeof tail[0];
  }
  _tile_loadd(4, scores, 4 * PAGE);
  _tile_loadd(5, values, stride);
  _tile_dpbf16ps(0, 4, 5);
  _tile_loadd(6, values + 2 * LANES, stride);
  _tile_dpbf16ps(1, 4, 6);
  if (V > 2) {
    _tile_loadd(5, values + 4 * LANES, stride);
    _tile_dpbf16ps(2, 4, 5);
    _tile_loadd(6, values + 6 * LANES, stride);
    _tile_dpbf16ps(3, 4, 6);
  }
}

// Values mixed by the exponentials, V vectors of the head from dimension d, to out [16][4 vectors]. `ready(p)` makes the
// exponentials of page p, one page ahead of its use.
template <int V, class Ready> inline void mix_tiles(const PagedHead &kv, const Seen<TILE_QUERIES> &seen, int head_dim, int d, const float *scores, F (*out)[4], Ready ready) {
  _tile_zero(0);
  _tile_zero(1);
  if (V > 2) {
    _tile_zero(2);
    _tile_zero(3);
  }
  ready(0);
  for (int p = 0; p < seen.count; p++) {
    if (p + 1 < seen.count) ready(p + 1);
    mix_page<V>(kv.values + seen.pages[p] * kv.stride + 2 * d, seen.keys - p * PAGE, head_dim, scores + p * TILE_QUERIES * PAGE);
  }
  _tile_stored(0, &out[0][0], sizeof out[0]);
  _tile_stored(1, &out[0][1], sizeof out[0]);
  if (V > 2) {
    _tile_stored(2, &out[0][2], sizeof out[0]);
    _tile_stored(3, &out[0][3], sizeof out[0]);
  }
}

// `count` queries; `scores` has room for 16 floats per position in use, `packed` for 8 * head_dim.
inline void attend_tiles(const Queries<TILE_QUERIES> &qs, int count, const PagedHead &kv, int head_dim, int window, float *scores, float *packed) {
  constexpr int ROWS = TILE_QUERIES * PAGE;
  const Seen<TILE_QUERIES> seen(qs.last, count, kv.pages, window);
  uint16_t *queries = (uint16_t *)packed;
  for (int i = 0; i < TILE_QUERIES; i++) // rows without a query get what the first has
    for (int d = 0; d < head_dim; d += LANES)
      store(queries + i * head_dim + d, float_to_bf16(load<F>(qs.query[i < count ? i : 0] + d)));
  F top[TILE_QUERIES], sums[TILE_QUERIES];
  float peak[TILE_QUERIES];
  for (int i = 0; i < count; i++) top[i] = splat(-INFINITY), sums[i] = F{};
  int masked = 0; // one step behind the scores, which come out of a tile late
  for (int p = 0; p < seen.count; p += 2) {
    if (p + 2 <= seen.count) score_tiles<2>(kv, seen.pages + p, head_dim, queries, scores + p * ROWS);
    else score_tiles<1>(kv, seen.pages + p, head_dim, queries, scores + p * ROWS);
    for (; masked < p; masked++) mask_page(scores + masked * ROWS, masked, seen, count, top);
  }
  for (; masked < seen.count; masked++) mask_page(scores + masked * ROWS, masked, seen, count, top);
  for (int i = 0; i < count; i++) peak[i] = maximum(top[i]);
  for (int d = 0; d < head_dim; d += 4 * LANES) {
    alignas(64) F out[TILE_QUERIES][4];
    const int vectors = head_dim - d < 4 * LANES ? 2 : 4;
    auto ready = [&](int p) {
      if (d == 0) soften_page(scores + p * ROWS, count, peak, sums);
    };
    if (vectors == 4) mix_tiles<4>(kv, seen, head_dim, d, scores, out, ready);
    else mix_tiles<2>(kv, seen, head_dim, d, scores, out, ready);
    for (int i = 0; i < count; i++) {
      const float total = sum(sums[i]);
      for (int v = 0; v < vectors; v++) store(qs.out[i] + d + v * LANES, out[i][v] / total);
    }
  }
}

#else

inline bool tiles_permitted() { return false; }
struct TileUnit {
  explicit TileUnit(bool) {}
};
inline void attend_tiles(const Queries<TILE_QUERIES> &, int, const PagedHead &, int, int, float *, float *) {}

#endif

} // namespace flare
