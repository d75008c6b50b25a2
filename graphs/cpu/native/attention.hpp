// Attention of a few query vectors that share a key head, over the pages in use.
//
// Owns scores, softmax and mixing of values for up to QUERIES queries at a time. Surprising rule: softmax is over whole
// rows of scores, and every sum runs in order of position, however many queries and pages are worked on at once; so
// neither chunking of a prompt nor batching changes a bit of the result.
#pragma once
#include "vec.hpp"
#include <utility>

namespace flare {

constexpr int PAGE = 32, QUERIES = 12;

// Keys [head_dim][PAGE] and values [PAGE][head_dim] of one page of one key head, bfloat16, at `base + page * stride`.
struct PagedHead {
  const uint16_t *keys, *values;
  int64_t stride;
  const int32_t *pages;
};

// Query i, already scaled, sees positions (last[i] - window, last[i]].
struct Queries {
  const float *query[QUERIES];
  float *out[QUERIES];
  int last[QUERIES];
};

// Scores of Q queries (packed [head_dim][Q]) with the keys of P pages; scores [page][Q][PAGE].
template <int Q, int P> inline void score_pages(const PagedHead &kv, const int32_t *pages, int head_dim, const float *packed, float *scores) {
  const uint16_t *k[P];
  F s[P][2][Q];
  for (int p = 0; p < P; p++) {
    k[p] = kv.keys + pages[p] * kv.stride;
    for (int i = 0; i < Q; i++) s[p][0][i] = s[p][1][i] = F{};
  }
  for (int d = 0; d < head_dim; d++)
#pragma GCC unroll 2
    for (int p = 0; p < P; p++) {
      F k0 = bf16_to_float(k[p] + d * PAGE), k1 = bf16_to_float(k[p] + d * PAGE + LANES);
#pragma GCC unroll 12
      for (int i = 0; i < Q; i++) {
        s[p][0][i] += k0 * packed[d * Q + i];
        s[p][1][i] += k1 * packed[d * Q + i];
      }
    }
  for (int p = 0; p < P; p++)
    for (int i = 0; i < Q; i++) {
      store(scores + (p * Q + i) * PAGE, s[p][0][i]);
      store(scores + (p * Q + i) * PAGE + LANES, s[p][1][i]);
    }
}

// Turn scores into exponentials, 0 outside (first[i], last[i]]; `total` gets their sums.
template <int Q> inline void soften(float *scores, int pages, const int *first, const int *last, float *total) {
  const I lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (int i = 0; i < Q; i++) {
    F top = splat(-INFINITY), sums{};
    for (int p = 0; p < pages; p++)
      for (int half = 0; half < PAGE; half += LANES) {
        float *at = scores + (p * Q + i) * PAGE + half;
        I j = lane + (p * PAGE + half);
        F s = select((j > first[i]) & (j <= last[i]), load<F>(at), splat(-INFINITY));
        store(at, s);
        top = vmax(top, s);
      }
    const float peak = maximum(top);
    for (int p = 0; p < pages; p++)
      for (int half = 0; half < PAGE; half += LANES) {
        float *at = scores + (p * Q + i) * PAGE + half;
        F e = vexp(load<F>(at) - peak);
        store(at, e);
        sums += e;
      }
    total[i] = sum(sums);
  }
}

// Values mixed by the exponentials, V vectors of the head at a time from dimension d; `keys` of them in all.
template <int Q, int V> inline void mix_values(const Queries &qs, const PagedHead &kv, const int32_t *pages, int keys, int head_dim, int d, const float *scores, const float *total) {
  F o[V][Q];
  for (int v = 0; v < V; v++)
    for (int i = 0; i < Q; i++) o[v][i] = F{};
  for (int p = 0; p * PAGE < keys; p++, scores += Q * PAGE) {
    const uint16_t *values = kv.values + pages[p] * kv.stride + d;
    const int here = keys - p * PAGE < PAGE ? keys - p * PAGE : PAGE;
    for (int j = 0; j < here; j++)
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) {
        F value = bf16_to_float(values + j * head_dim + v * LANES);
#pragma GCC unroll 12
        for (int i = 0; i < Q; i++) o[v][i] += value * scores[i * PAGE + j];
      }
  }
  for (int i = 0; i < Q; i++)
    for (int v = 0; v < V; v++) store(qs.out[i] + d + v * LANES, o[v][i] / total[i]);
}

// `scores` has room for Q floats per position in use, `packed` for head_dim * Q.
template <int Q> inline void attend(const Queries &qs, const PagedHead &kv, int head_dim, int window, float *scores, float *packed) {
  int low = qs.last[0], high = qs.last[0], first[Q], last[Q];
  for (int i = 1; i < Q; i++) {
    low = qs.last[i] < low ? qs.last[i] : low;
    high = qs.last[i] > high ? qs.last[i] : high;
  }
  const int begin = low - window + 1 > 0 ? (low - window + 1) / PAGE : 0, count = high / PAGE + 1 - begin;
  const int32_t *pages = kv.pages + begin;
  for (int i = 0; i < Q; i++) {
    first[i] = qs.last[i] - window - begin * PAGE;
    last[i] = qs.last[i] - begin * PAGE;
    for (int d = 0; d < head_dim; d++) packed[d * Q + i] = qs.query[i][d];
  }
  constexpr bool FEW = Q <= 6; // so few sums that each one's latency would show: work on twice as many
  int p = 0;
  if (FEW)
    for (; p + 2 <= count; p += 2) score_pages<Q, FEW ? 2 : 1>(kv, pages + p, head_dim, packed, scores + p * Q * PAGE);
  for (; p < count; p++) score_pages<Q, 1>(kv, pages + p, head_dim, packed, scores + p * Q * PAGE);
  float total[Q];
  soften<Q>(scores, count, first, last, total);
  const int keys = high + 1 - begin * PAGE;
  int d = 0;
  if (FEW)
    for (; d + 4 * LANES <= head_dim; d += 4 * LANES) mix_values<Q, FEW ? 4 : 1>(qs, kv, pages, keys, head_dim, d, scores, total);
  for (; d < head_dim; d += 2 * LANES) mix_values<Q, 2>(qs, kv, pages, keys, head_dim, d, scores, total);
}

using Attend = void (*)(const Queries &, const PagedHead &, int, int, float *, float *);

struct AttendTable {
  Attend of[QUERIES];
};
template <int... Q> constexpr AttendTable attend_table(std::integer_sequence<int, Q...>) { return {{&attend<Q + 1>...}}; }
inline constexpr AttendTable ATTEND = attend_table(std::make_integer_sequence<int, QUERIES>{});

} // namespace flare
