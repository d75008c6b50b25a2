// Attention of a few query vectors that share a key head, over the pages in use.
//
// Owns scores, softmax and mixing of values for up to QUERIES queries at a time. Surprising rule: softmax is over whole
// rows of scores, in order of position, so that neither chunking of a prompt nor batching changes a bit of the result.
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

// Queries [n][head_dim] at `query`, already scaled; query i sees positions (last[i] - window, last[i]].
struct Queries {
  const float *query[QUERIES];
  float *out[QUERIES];
  int last[QUERIES];
};

// `scores` has room for Q rows of `span` floats, `packed` for head_dim * Q.
template <int Q> inline void attend(const Queries &qs, const PagedHead &kv, int head_dim, int window, float *scores, float *packed) {
  int low = qs.last[0], high = qs.last[0];
  for (int i = 1; i < Q; i++) {
    low = qs.last[i] < low ? qs.last[i] : low;
    high = qs.last[i] > high ? qs.last[i] : high;
  }
  const int begin = low - window + 1 > 0 ? (low - window + 1) / PAGE : 0, end = high / PAGE + 1;
  const int span = (end - begin) * PAGE;
  for (int i = 0; i < Q; i++)
    for (int d = 0; d < head_dim; d++) packed[d * Q + i] = qs.query[i][d];
  for (int p = begin; p < end; p++) {
    const uint16_t *k = kv.keys + kv.pages[p] * kv.stride;
    F s[Q][2];
    for (int i = 0; i < Q; i++) s[i][0] = s[i][1] = F{};
    for (int d = 0; d < head_dim; d++) {
      F k0 = bf16_to_float(k + d * PAGE), k1 = bf16_to_float(k + d * PAGE + LANES);
#pragma GCC unroll 12
      for (int i = 0; i < Q; i++) {
        s[i][0] += k0 * packed[d * Q + i];
        s[i][1] += k1 * packed[d * Q + i];
      }
    }
    for (int i = 0; i < Q; i++) {
      store(scores + i * span + (p - begin) * PAGE, s[i][0]);
      store(scores + i * span + (p - begin) * PAGE + LANES, s[i][1]);
    }
  }
  float inverse[Q];
  const I lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (int i = 0; i < Q; i++) {
    float *row = scores + i * span;
    const int first = qs.last[i] - window + 1 - begin * PAGE, last = qs.last[i] - begin * PAGE;
    F top = splat(-INFINITY), total{};
    for (int j = 0; j < span; j += LANES) {
      I at = lane + j;
      F s = select((at >= first) & (at <= last), load<F>(row + j), splat(-INFINITY));
      store(row + j, s);
      top = vmax(top, s);
    }
    const float peak = maximum(top);
    for (int j = 0; j < span; j += LANES) {
      F e = vexp(load<F>(row + j) - peak);
      store(row + j, e);
      total += e;
    }
    inverse[i] = 1.0f / sum(total);
  }
  for (int d = 0; d < head_dim; d += 2 * LANES) {
    F o[Q][2];
    for (int i = 0; i < Q; i++) o[i][0] = o[i][1] = F{};
    for (int p = begin; p < end; p++) {
      const uint16_t *v = kv.values + kv.pages[p] * kv.stride + d;
      const float *weight = scores + (p - begin) * PAGE;
      const int here = high + 1 - p * PAGE < PAGE ? high + 1 - p * PAGE : PAGE;
      for (int j = 0; j < here; j++) {
        F v0 = bf16_to_float(v + j * head_dim), v1 = bf16_to_float(v + j * head_dim + LANES);
#pragma GCC unroll 12
        for (int i = 0; i < Q; i++) {
          o[i][0] += v0 * weight[i * span + j];
          o[i][1] += v1 * weight[i * span + j];
        }
      }
    }
    for (int i = 0; i < Q; i++) {
      store(qs.out[i] + d, o[i][0] * inverse[i]);
      store(qs.out[i] + d + LANES, o[i][1] * inverse[i]);
    }
  }
}

using Attend = void (*)(const Queries &, const PagedHead &, int, int, float *, float *);

struct AttendTable {
  Attend of[QUERIES];
};
template <int... Q> constexpr AttendTable attend_table(std::integer_sequence<int, Q...>) { return {{&attend<Q + 1>...}}; }
inline constexpr AttendTable ATTEND = attend_table(std::make_integer_sequence<int, QUERIES>{});

} // namespace flare
