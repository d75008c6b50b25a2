// From a row of logits to a token and its scores: the twin of programs/sampling.py, which defines it.
//
// Owns penalties, cuts, noise, log-softmax and the best alternatives. Surprising rule: cuts are found through a histogram
// of distances from the maximum; only the bucket that a cut falls in is ever sorted.
#pragma once
#include "vec.hpp"
#include <algorithm>
#include <functional>
#include <vector>

namespace flare {

inline uint64_t mix64(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}
inline uint64_t draw_key(uint64_t seed, uint64_t position) {
  return mix64(mix64(seed + 0x9E3779B97F4A7C15ull) + 0x9E3779B97F4A7C15ull * (position + 1));
}
inline U mix32(U h) {
  h ^= h >> 16;
  h *= 0x7FEB352Du;
  h ^= h >> 15;
  h *= 0x846CA68Bu;
  return h ^ (h >> 16);
}
inline F gumbel(uint64_t key, U tokens) {
  U h = mix32(mix32(tokens + (uint32_t)key) ^ (uint32_t)(key >> 32));
  F v = to_float(h) * 0x1p-32f + 0x1p-33f;
  F series = v * (1.0f + v * (0.5f + v * (1.0f / 3 + v * (0.25f + v * (0.2f + v * (1.0f / 6))))));
  F rest = 1.0f - v;
  F direct = -vlog(select(rest > 0x1p-33f, rest, splat(0x1p-33f)));
  return -vlog(select(v < 0.03125f, series, direct));
}

struct Best {
  float value;
  int token;
};

// The largest of f(16 lanes from i); the lowest index wins a tie. `size` need not be a multiple of 16.
template <class Value> inline Best argmax(int size, Value value) {
  const I lane = lane_numbers();
  F top = splat(-INFINITY);
  I where = splat(0);
  for (int i = 0; i < size; i += LANES) {
    I at = lane + i;
    F v = select(at < size, value(i, at), splat(-INFINITY));
    I better = v > top;
    top = select(better, v, top);
    where = (better & at) | (~better & where);
  }
  Best best{-INFINITY, 0};
  for (int j = 0; j < LANES; j++)
    if (top[j] > best.value || (top[j] == best.value && where[j] < best.token)) best = {top[j], where[j]};
  return best;
}

inline float log_sum_exp(const float *logits, int size, float top) {
  F total{};
  int i = 0;
  for (; i + LANES <= size; i += LANES) total += vexp(load<F>(logits + i) - top);
  float rest = 0;
  for (; i < size; i++) rest += std::exp(logits[i] - top);
  return top + std::log(sum(total) + rest);
}

// The best `count` tokens, best first, as log-probabilities.
inline void alternatives(const float *logits, int size, float normalizer, int count, int32_t *tokens, float *logprobs) {
  count = std::min(count, size);
  int held = 0;
  auto insert = [&](float value, int token) {
    if (held == count && value <= logprobs[held - 1]) return;
    int at = held < count ? held++ : held - 1;
    for (; at > 0 && logprobs[at - 1] < value; at--) {
      logprobs[at] = logprobs[at - 1];
      tokens[at] = tokens[at - 1];
    }
    logprobs[at] = value;
    tokens[at] = token;
  };
  if (count == 0) return;
  for (int i = 0; i < size; i += LANES) {
    if (held == count && i + LANES <= size && !any(load<F>(logits + i) > logprobs[held - 1])) continue;
    for (int j = i; j < std::min(i + LANES, size); j++) insert(logits[j], j);
  }
  for (int i = 0; i < held; i++) logprobs[i] -= normalizer;
}

// Copy a multiple of 16 logits; says whether all are finite.
inline bool copy_finite(const float *logits, int64_t size, float *to) {
  I strange{};
  for (int64_t i = 0; i < size; i += LANES) {
    F v = load<F>(logits + i);
    strange |= v * 0.0f != 0.0f;
    store(to + i, v);
  }
  return !any(strange);
}

struct Cuts {
  float min_p, top_p;
  int top_k;
  bool active(int size) const { return min_p > 0 || top_p < 1 || (top_k > 0 && top_k < size); }
};

class Histogram { // of distances below the maximum, 1/32 nat a bucket, the last one open
public:
  static constexpr int BUCKETS = 1024;
  Histogram(const float *z, int size, float top, float least) : z_(z), size_(size), top_(top), least_(least) {}

  // Smallest kept value if values are kept, best first, while the weight before them stays below `limit(total)`.
  template <class Weight, class Limit> float cut(Weight weight, Limit limit) {
    double mass[BUCKETS] = {};
    double total = 0;
    for (int i = 0; i < size_; i++)
      if (z_[i] >= least_) mass[bucket(z_[i])] += weight(z_[i]);
    for (double m : mass) total += m;
    const double most = limit(total);
    double before = 0;
    for (int b = 0; b < BUCKETS; b++) {
      if (mass[b] == 0 || before + mass[b] < most) {
        before += mass[b];
        continue;
      }
      std::vector<float> inside;
      for (int i = 0; i < size_; i++)
        if (z_[i] >= least_ && bucket(z_[i]) == b) inside.push_back(z_[i]);
      std::sort(inside.begin(), inside.end(), std::greater<float>());
      float kept = inside[0];
      for (float z : inside) {
        if (before >= most) break;
        kept = z;
        before += weight(z);
      }
      return kept;
    }
    return least_;
  }

private:
  int bucket(float z) const {
    float distance = (top_ - z) * 32.0f;
    return distance < BUCKETS - 1 ? (int)distance : BUCKETS - 1;
  }
  const float *z_;
  int size_;
  float top_, least_;
};

// The value below which min-p, top-k and top-p exclude.
inline float threshold(const float *z, int size, float top, const Cuts &cuts) {
  float least = cuts.min_p > 0 ? top + std::log(cuts.min_p) : std::nextafter(-INFINITY, 0.0f);
  if (cuts.top_k > 0 && cuts.top_k < size)
    least = std::max(least, Histogram(z, size, top, least).cut([](float) { return 1.0; }, [&](double) { return cuts.top_k; }));
  if (cuts.top_p < 1)
    least = std::max(least, Histogram(z, size, top, least)
                                .cut([top](float v) { return (double)std::exp(v - top); },
                                     [&](double total) { return std::max(cuts.top_p * total, 1e-300); }));
  return least;
}

constexpr uint64_t DRAFT_SALT = 0x6A09E667F3BCC909ull, JUDGE_SALT = 0x3C6EF372FE94F82Bull;

// z becomes its own softmax over what the cuts leave.
inline void to_probabilities(float *z, int size, float top, float least) {
  double total = 0;
  for (int i = 0; i < size; i++) total += z[i] = z[i] >= least ? std::exp(z[i] - top) : 0.0f;
  for (int i = 0; i < size; i++) z[i] = (float)(z[i] / total);
}

inline U token_ids(const int32_t *kept, int i, I at, int size) {
  if (!kept) return (U)at;
  if (i + LANES <= size) return (U)load<I>(kept + i);
  int32_t last[LANES];
  for (int j = 0; j < LANES; j++) last[j] = kept[std::min(i + j, size - 1)];
  return (U)load<I>(last);
}

// Draw from softmax(z / temperature) with cuts; `z` is overwritten. Temperature 0 is greedy. `kept` names the tokens of a
// reduced vocabulary, whose place is returned; `q` takes the probabilities drawn from.
inline int draw(float *z, int size, float temperature, const Cuts &cuts, uint64_t key, const int32_t *kept = nullptr, float *q = nullptr) {
  auto plain = [z](int i, I) { return load<F>(z + i); };
  if (temperature == 0) return argmax(size, plain).token;
  for (int i = 0; i < size; i += LANES) store(z + i, load<F>(z + i) / temperature);
  float least = std::nextafter(-INFINITY, 0.0f);
  const bool active = cuts.active(size);
  if (active || q) {
    const float top = argmax(size, plain).value;
    if (active) least = threshold(z, size, top, cuts);
    if (q) {
      std::copy(z, z + size, q);
      to_probabilities(q, size, top, least);
    }
  }
  return argmax(size, [&](int i, I at) {
           F v = load<F>(z + i);
           I kept_here = v >= least;
           return any(kept_here) ? select(kept_here, v + gumbel(key, token_ids(kept, i, at, size)), splat(-INFINITY)) : splat(-INFINITY);
         })
      .token;
}

struct Judged {
  int token;
  float ratio; // min(1, p/q) of the proposal
};

// Accept `proposal` with min(1, p/q), or draw from what is left of p (Leviathan et al., 2023). `q` are the probabilities
// that it was drawn from, over `kept` tokens or all; null: it was certain.
inline Judged judge(float *z, int size, float temperature, const Cuts &cuts, uint64_t key, int proposal, const float *q, int q_size, const int32_t *kept) {
  for (int i = 0; i < size; i += LANES) store(z + i, load<F>(z + i) / temperature);
  const float top = argmax(size, [z](int i, I) { return load<F>(z + i); }).value;
  to_probabilities(z, size, top, cuts.active(size) ? threshold(z, size, top, cuts) : std::nextafter(-INFINITY, 0.0f));
  const float p = z[proposal];
  float drawn_from = q ? 0.0f : 1.0f;
  for (int i = 0; i < q_size; i++) {
    const int token = kept ? kept[i] : i;
    if (token == proposal) drawn_from = q[i];
    z[token] -= q[i];
  }
  if (!q) z[proposal] = 0;
  const float ratio = drawn_from > 0 ? std::min(1.0f, p / drawn_from) : 1.0f;
  const float uniform = (float)((double)(mix64(key ^ JUDGE_SALT) >> 11) * 0x1p-53);
  if (uniform < ratio) return {proposal, ratio};
  for (int i = 0; i < size; i++) z[i] = z[i] > 0 ? std::log(z[i]) : -INFINITY;
  const Best best = argmax(size, [&](int i, I at) { return load<F>(z + i) + gumbel(key, (U)at); });
  return {best.value > -INFINITY ? best.token : proposal, ratio};
}

} // namespace flare
