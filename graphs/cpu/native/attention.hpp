// Attention of a few query vectors that share a key head, over the pages in use.
//
// Owns the layout within a page, scores, softmax and mixing of values for up to QUERIES queries at a time. Surprising
// rule: softmax is over whole rows of scores, and every sum runs in order of position, however many queries and pages are
// worked on at once; so neither chunking of a prompt nor batching changes a bit of the result.
#pragma once
#include "vec.hpp"
#include <utility>

namespace flare {

constexpr int PAGE = 32;

// The registers hold the sums of QUERIES queries; of more than SOME only for half a page. The sums of at most FEW are so few
// that each one's latency would show: work on twice as many.
#if defined(FLARE_PAIRS)
constexpr int QUERIES = 4, FEW = 1, SOME = 2;
#else
constexpr int QUERIES = 12, FEW = 6, SOME = 12;
#endif

// One page of one key head at `base + page * stride`, bfloat16 in pairs of what is summed over: keys
// [head_dim / 2][PAGE][2] and values [PAGE / 2][head_dim][2].
struct PagedHead {
  uint16_t *keys, *values;
  int64_t stride;
  const int32_t *pages;

  // Store a key and a value at a position. Its neighbour's half of a pair may be written at the same time.
  void put(int position, int head_dim, const float *key, const float *value) const {
    const int slot = position % PAGE;
    uint16_t *k = keys + pages[position / PAGE] * stride + 2 * slot;
    uint16_t *v = values + pages[position / PAGE] * stride + (slot / 2 * head_dim) * 2 + slot % 2;
    for (int d = 0; d < head_dim; d += LANES) {
      const S ks = float_to_bf16(load<F>(key + d)), vs = float_to_bf16(load<F>(value + d));
      for (int i = 0; i < LANES; i++) {
        k[(d + i) / 2 * 2 * PAGE + i % 2] = ks[i];
        v[2 * (d + i)] = vs[i];
      }
    }
  }
};

// Query i, already scaled, sees positions (last[i] - window, last[i]].
template <int N> struct Queries {
  const float *query[N];
  float *out[N];
  int last[N];
};

// The pages that some queries see, and what each sees of them, counted from the first page.
template <int Q> struct Seen {
  const int32_t *pages;
  int count, keys, first[Q], last[Q]; // query i sees keys (first[i], last[i]]; `keys` of them are seen by any

  Seen(const int *last_position, int queries, const int32_t *table, int window) {
    int low = last_position[0], high = last_position[0];
    for (int i = 1; i < queries; i++) {
      low = last_position[i] < low ? last_position[i] : low;
      high = last_position[i] > high ? last_position[i] : high;
    }
    const int begin = low - window + 1 > 0 ? (low - window + 1) / PAGE : 0;
    pages = table + begin;
    count = high / PAGE + 1 - begin;
    keys = high + 1 - begin * PAGE;
    for (int i = 0; i < queries; i++) {
      first[i] = last_position[i] - window - begin * PAGE;
      last[i] = last_position[i] - begin * PAGE;
    }
  }
};

inline F low_half(U pair) { return (F)(pair << 16); }
inline F high_half(U pair) { return (F)(pair & 0xffff0000u); }

// One row of scores, [page][PAGE] at `stride` floats from page to page: -inf outside (first, last]; gives the largest.
inline float mask_row(float *scores, int stride, int pages, int first, int last) {
  const I lane = lane_numbers();
  F top = splat(-INFINITY);
  for (int p = 0; p < pages; p++)
    for (int half = 0; half < PAGE; half += LANES) {
      const int begin = p * PAGE + half;
      float *at = scores + p * stride + half;
      F s = load<F>(at);
      if (begin <= first || begin + LANES - 1 > last) {
        I j = lane + begin;
        s = select((j > first) & (j <= last), s, splat(-INFINITY));
        store(at, s);
      }
      top = vmax(top, s);
    }
  return maximum(top);
}

// Scores of Q queries (packed [head_dim][Q]) with the keys of P pages; scores [page][Q][PAGE].
template <int Q, int P> inline void score_pages(const PagedHead &kv, const int32_t *pages, int head_dim, const float *packed, float *scores) {
  const uint16_t *k[P];
  F s[P][2][Q];
  for (int p = 0; p < P; p++) {
    k[p] = kv.keys + pages[p] * kv.stride;
    for (int i = 0; i < Q; i++) s[p][0][i] = s[p][1][i] = F{};
  }
  for (int d = 0; d < head_dim; d += 2)
#pragma GCC unroll 2
    for (int p = 0; p < P; p++) {
      const U k0 = load<U>(k[p] + d * PAGE), k1 = load<U>(k[p] + d * PAGE + 2 * LANES);
      const F low0 = low_half(k0), low1 = low_half(k1), high0 = high_half(k0), high1 = high_half(k1);
#pragma GCC unroll 12
      for (int i = 0; i < Q; i++) {
        s[p][0][i] += low0 * packed[d * Q + i];
        s[p][1][i] += low1 * packed[d * Q + i];
      }
#pragma GCC unroll 12
      for (int i = 0; i < Q; i++) {
        s[p][0][i] += high0 * packed[(d + 1) * Q + i];
        s[p][1][i] += high1 * packed[(d + 1) * Q + i];
      }
    }
  for (int p = 0; p < P; p++)
    for (int i = 0; i < Q; i++) {
      store(scores + (p * Q + i) * PAGE, s[p][0][i]);
      store(scores + (p * Q + i) * PAGE + LANES, s[p][1][i]);
    }
}

// The same for one page, in two halves.
template <int Q> inline void score_halves(const PagedHead &kv, const int32_t *page, int head_dim, const float *packed, float *scores) {
  for (int half = 0; half < PAGE; half += LANES) {
    const uint16_t *k = kv.keys + *page * kv.stride + 2 * half;
    F s[Q];
    for (int i = 0; i < Q; i++) s[i] = F{};
    for (int d = 0; d < head_dim; d += 2) {
      const U pair = load<U>(k + d * PAGE);
      const F low = low_half(pair), high = high_half(pair);
#pragma GCC unroll 4
      for (int i = 0; i < Q; i++) s[i] += low * packed[d * Q + i];
#pragma GCC unroll 4
      for (int i = 0; i < Q; i++) s[i] += high * packed[(d + 1) * Q + i];
    }
    for (int i = 0; i < Q; i++) store(scores + i * PAGE + half, s[i]);
  }
}

// Turn scores into exponentials, 0 outside what a query sees; `total` gets their sums.
template <int Q> inline void soften(float *scores, const Seen<Q> &seen, float *total) {
  for (int i = 0; i < Q; i++) {
    const float peak = mask_row(scores + i * PAGE, Q * PAGE, seen.count, seen.first[i], seen.last[i]);
    F sums{};
    for (int p = 0; p < seen.count; p++)
      for (int half = 0; half < PAGE; half += LANES) {
        float *at = scores + (p * Q + i) * PAGE + half;
        F e = vexp(load<F>(at) - peak);
        store(at, e);
        sums += e;
      }
    total[i] = sum(sums);
  }
}

// Values mixed by the exponentials, V vectors of the head at a time from dimension d.
template <int Q, int V> inline void mix_values(const Queries<QUERIES> &qs, const PagedHead &kv, const Seen<Q> &seen, int head_dim, int d, const float *scores, const float *total) {
  F o[V][Q];
  for (int v = 0; v < V; v++)
    for (int i = 0; i < Q; i++) o[v][i] = F{};
  for (int p = 0; p < seen.count; p++, scores += Q * PAGE) {
    const uint16_t *values = kv.values + seen.pages[p] * kv.stride + 2 * d;
    const int here = seen.keys - p * PAGE < PAGE ? seen.keys - p * PAGE : PAGE;
    for (int j = 0; j < here; j += 2)
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) {
        const U pair = load<U>(values + j * head_dim + 2 * v * LANES);
        const F low = low_half(pair), high = high_half(pair);
#pragma GCC unroll 12
        for (int i = 0; i < Q; i++) o[v][i] += low * scores[i * PAGE + j];
        if (j + 1 == here) continue; // the other half is nobody's
#pragma GCC unroll 12
        for (int i = 0; i < Q; i++) o[v][i] += high * scores[i * PAGE + j + 1];
      }
  }
  for (int i = 0; i < Q; i++)
    for (int v = 0; v < V; v++) store(qs.out[i] + d + v * LANES, o[v][i] / total[i]);
}

// `scores` has room for Q floats per position in use, `packed` for head_dim * Q.
template <int Q> inline void attend(const Queries<QUERIES> &qs, const PagedHead &kv, int head_dim, int window, float *scores, float *packed) {
  const Seen<Q> seen(qs.last, Q, kv.pages, window);
  for (int i = 0; i < Q; i++)
    for (int d = 0; d < head_dim; d++) packed[d * Q + i] = qs.query[i][d];
  int p = 0;
  if constexpr (Q <= FEW)
    for (; p + 2 <= seen.count; p += 2) score_pages<Q, 2>(kv, seen.pages + p, head_dim, packed, scores + p * Q * PAGE);
  for (; p < seen.count; p++)
    if constexpr (Q <= SOME) score_pages<Q, 1>(kv, seen.pages + p, head_dim, packed, scores + p * Q * PAGE);
    else score_halves<Q>(kv, seen.pages + p, head_dim, packed, scores + p * Q * PAGE);
  float total[Q];
  soften<Q>(scores, seen, total);
  int d = 0;
  if constexpr (Q <= FEW)
    for (; d + 4 * LANES <= head_dim; d += 4 * LANES) mix_values<Q, 4>(qs, kv, seen, head_dim, d, scores, total);
  constexpr int V = Q <= SOME ? 2 : 1;
  for (; d < head_dim; d += V * LANES) mix_values<Q, V>(qs, kv, seen, head_dim, d, scores, total);
}

using Attend = void (*)(const Queries<QUERIES> &, const PagedHead &, int, int, float *, float *);

struct AttendTable {
  Attend of[QUERIES];
};
template <int... Q> constexpr AttendTable attend_table(std::integer_sequence<int, Q...>) { return {{&attend<Q + 1>...}}; }
constexpr AttendTable ATTEND = attend_table(std::make_integer_sequence<int, QUERIES>{});

} // namespace flare
