// A whole step of a decoder in one call: forward pass, output projection, sampling, advance of the state rows.
//
// Owns the order of work and who does it. Memory belongs to the caller; the layouts are those of programs/rows.py,
// programs/buffers.py and memory/pages.py. Surprising rule: few rows are shared out by outputs among all threads with a
// barrier after each part; many rows are shared out by rows, each thread taking a block of them through a whole layer.
#include "attention.hpp"
#include "gemm.hpp"
#include "records.hpp"
#include "sampling.hpp"
#include "team.hpp"
#include <algorithm>
#include <chrono>

using namespace flare;

namespace {

enum { RUNNING = 0, ENDED_STOP = 1, ENDED_LENGTH = 2 };
enum { NO_TOKEN = -1, NOT_FINITE = -2 };
constexpr int TEAM_ROWS = 32, SOLO_ROWS = 32;
constexpr int PHASES_PER_LAYER = 9; // calls of Crew::each by the whole team in `project` and `mix`

struct Row {
  int token, position, slot, lane;
};

class Step {
public:
  Step(const FlareModel &model, const FlareRows &rows, const FlareBuffers &buffers, const FlareSpace &space, int threads)
      : m(model), s(rows), b(buffers), w(space),
        team(threads, PHASES_PER_LAYER * (int)model.layers + 4 + 6 * (1 + (int)(space.rows_max / space.logits_rows))) {}

  int64_t decode(int lanes) {
    auto began = std::chrono::steady_clock::now();
    rows.clear();
    drawn.clear();
    for (int lane = 0; lane < lanes; lane++) {
      int slot = b.slot[lane];
      b.token[lane] = NO_TOKEN;
      if (s.ended[slot] != RUNNING) continue;
      drawn.push_back((int)rows.size());
      rows.push_back({s.pending[slot], s.committed[slot] - 1, slot, lane});
    }
    if (!rows.empty()) run(false);
    return elapsed(began);
  }

  int64_t prefill(int lanes, bool scored) {
    auto began = std::chrono::steady_clock::now();
    rows.clear();
    drawn.clear();
    for (int lane = 0; lane < lanes; lane++) {
      int slot = b.slot[lane];
      b.token[lane] = NO_TOKEN;
      for (int i = 0; i < b.rows[lane]; i++) rows.push_back({b.tokens[rows.size()], b.start[lane] + i, slot, lane});
      s.committed[slot] = b.start[lane] + b.rows[lane];
      if (b.emits[lane]) drawn.push_back((int)rows.size() - 1);
    }
    run(scored);
    return elapsed(began);
  }

private:
  static int64_t elapsed(std::chrono::steady_clock::time_point began) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - began).count();
  }
  int query_width() const { return (int)(m.heads * m.head_dim); }
  int qkv_width() const { return (int)((m.heads + 2 * m.kv_heads) * m.head_dim); }

  void run(bool scored) {
    team.run([this, scored](int rank) {
      Crew crew{&team, rank};
      if ((int)rows.size() <= TEAM_ROWS) forward_together(crew);
      else forward_by_rows(crew);
      crew.sync();
      if (scored) score(crew);
      for (int first = 0; first < (int)drawn.size(); first += (int)w.logits_rows)
        sample(crew, first, std::min((int)drawn.size(), first + (int)w.logits_rows));
    });
  }

  void forward_together(Crew &crew) {
    int n = (int)rows.size();
    embed(crew, 0, n);
    crew.sync();
    for (int l = 0; l < m.layers; l++) {
      project(crew, l, 0, n);
      crew.sync();
      mix(crew, l, 0, n);
    }
  }

  // One barrier per layer: attention reads what all rows of the chunk have stored.
  void forward_by_rows(Crew &crew) {
    int blocks = ((int)rows.size() + SOLO_ROWS - 1) / SOLO_ROWS, n = (int)rows.size();
    auto share = [&](auto part) {
      crew.each(blocks, 1, [&](int block, int) {
        Crew solo{nullptr, crew.rank};
        int turned = blocks - 1 - block; // the last rows see the most keys: begin with them
        part(solo, n * turned / blocks, n * (turned + 1) / blocks);
      });
      crew.sync();
    };
    share([&](Crew &solo, int first, int last) {
      embed(solo, first, last);
      project(solo, 0, first, last);
    });
    for (int l = 0; l < m.layers; l++)
      share([&](Crew &solo, int first, int last) {
        mix(solo, l, first, last);
        if (l + 1 < m.layers) project(solo, l + 1, first, last);
      });
  }

  void embed(Crew &crew, int first, int last) {
    crew.each(last - first, 1, [&](int from, int to) {
      for (int r = first + from; r < first + to; r++) weight_row(m.embedding, rows[r].token, w.x + r * m.hidden);
    });
  }

  void norm(Crew &crew, const Activations &to, const float *weight, int first, int last) {
    crew.each(last - first, 1, [&](int from, int until) {
      for (int r = first + from; r < first + until; r++) norm_row(w.x + r * m.hidden, weight, to, r);
    });
    crew.sync();
  }

  void norm_row(const float *x, const float *weight, const Activations &to, int row) {
    F squares{};
    for (int i = 0; i < m.hidden; i += LANES) {
      F v = load<F>(x + i);
      squares += v * v;
    }
    float scale = 1.0f / std::sqrt(sum(squares) / (float)m.hidden + (float)m.norm_eps);
    for (int i = 0, g = 0; i < m.hidden; i += GROUP, g++)
      to.put(row, g, load<F>(x + i) * scale * load<F>(weight + i),
             load<F>(x + i + LANES) * scale * load<F>(weight + i + LANES));
  }

  // Queries, keys and values of rows [first, last); keys and values go to their pages.
  void project(Crew &crew, int l, int first, int last) {
    const FlareLayer &layer = m.layer[l];
    norm(crew, w.narrow, layer.input_norm, first, last);
    crew.each((int)layer.qkv.blocks, crew.share((int)layer.qkv.blocks), [&](int from, int to) {
      for (int block = from; block < to; block++)
        multiply(layer.qkv, block, w.narrow, first, last,
                 [&](int r, F v) { store(w.qkv + (int64_t)r * qkv_width() + block * LANES, v); });
    });
    crew.sync();
    crew.each(last - first, 1, [&](int from, int to) {
      for (int r = first + from; r < first + to; r++) rotate_and_store(layer, l, r);
    });
  }

  void rotate_and_store(const FlareLayer &layer, int l, int r) {
    const int d = (int)m.head_dim, half = d / 2, position = rows[r].position;
    const float *cosine = m.rotary + (int64_t)position * d, *sine = cosine + half;
    float *at = w.qkv + (int64_t)r * qkv_width();
    for (int h = 0; h < m.heads + m.kv_heads; h++, at += d) {
      const bool query = h < m.heads;
      if (const float *weight = query ? layer.query_norm : layer.key_norm) {
        F squares{};
        for (int i = 0; i < d; i += LANES) squares += load<F>(at + i) * load<F>(at + i);
        float scale = 1.0f / std::sqrt(sum(squares) / (float)d + (float)m.norm_eps);
        for (int i = 0; i < d; i += LANES) store(at + i, load<F>(at + i) * scale * load<F>(weight + i));
      }
      const float factor = query ? 1.0f / std::sqrt((float)d) : 1.0f;
      for (int i = 0; i < half; i += LANES) {
        F a = load<F>(at + i), c = load<F>(at + half + i), co = load<F>(cosine + i), si = load<F>(sine + i);
        store(at + i, (a * co - c * si) * factor);
        store(at + half + i, (c * co + a * si) * factor);
      }
    }
    const int32_t page = s.page_table[rows[r].slot * s.table_pages + position / PAGE];
    const float *k = w.qkv + (int64_t)r * qkv_width() + query_width(), *v = k + m.kv_heads * d;
    const int64_t base = (l * w.pages + page) * m.kv_heads * d * PAGE, slot = position % PAGE;
    for (int h = 0; h < m.kv_heads; h++) {
      uint16_t *keys = w.keys + base + (int64_t)h * d * PAGE + slot, *values = w.values + base + (h * PAGE + slot) * d;
      for (int i = 0; i < d; i += LANES) {
        S key = float_to_bf16(load<F>(k + h * d + i));
        for (int j = 0; j < LANES; j++) keys[(i + j) * PAGE] = key[j];
        store(values + i, float_to_bf16(load<F>(v + h * d + i)));
      }
    }
  }

  // Attention, output and MLP of rows [first, last), added to the residual stream.
  void mix(Crew &crew, int l, int first, int last) {
    const FlareLayer &layer = m.layer[l];
    const int group = (int)(m.heads / m.kv_heads), height = std::max(1, QUERIES / group);
    const bool prompt = last - first > 1 && rows[first].lane == rows[first + 1].lane;
    const int tiles = prompt ? (last - first + height - 1) / height : last - first;
    crew.each(tiles * (int)m.kv_heads, 1, [&](int from, int to) {
      for (int task = from; task < to; task++) {
        int t = task / (int)m.kv_heads, rise = prompt ? height : 1;
        attend_rows(crew.rank, l, first + t * rise, std::min(last, first + (t + 1) * rise), task % (int)m.kv_heads);
      }
    });
    crew.sync();
    crew.each(last - first, 1, [&](int from, int to) {
      for (int r = first + from; r < first + to; r++)
        for (int g = 0; g < w.heads.groups; g++) {
          const float *at = w.attended + (int64_t)r * query_width() + g * GROUP;
          w.heads.put(r, g, load<F>(at), load<F>(at + LANES));
        }
    });
    crew.sync();
    add(crew, layer.output, w.heads, first, last);
    norm(crew, w.narrow, layer.mlp_norm, first, last);
    const int units = (int)(m.intermediate / GROUP);
    crew.each(units, crew.share(units), [&](int from, int to) {
      for (int unit = from; unit < to; unit++) gate(layer.gate_up, unit, first, last);
    });
    crew.sync();
    add(crew, layer.down, w.wide, first, last);
  }

  // Rows [first, last) may belong to several requests; each run of one request attends together.
  void attend_rows(int rank, int l, int first, int last, int kv_head) {
    const int d = (int)m.head_dim, group = (int)(m.heads / m.kv_heads);
    float *packed = w.thread_scratch + rank * w.scratch_floats, *scores = packed + QUERIES * d;
    Queries qs;
    int held = 0;
    auto flush = [&](int slot) {
      const int64_t base = (l * w.pages * m.kv_heads + kv_head) * d * PAGE;
      PagedHead kv{w.keys + base, w.values + base, m.kv_heads * d * PAGE, s.page_table + slot * s.table_pages};
      if (held) ATTEND.of[held - 1](qs, kv, d, (int)m.window, scores, packed);
      held = 0;
    };
    for (int r = first; r < last; r++) {
      for (int h = kv_head * group; h < (kv_head + 1) * group; h++) {
        qs.query[held] = w.qkv + (int64_t)r * qkv_width() + h * d;
        qs.out[held] = w.attended + (int64_t)r * query_width() + h * d;
        qs.last[held++] = rows[r].position;
        if (held == QUERIES) flush(rows[r].slot);
      }
      if (r + 1 == last || rows[r + 1].slot != rows[r].slot) flush(rows[r].slot);
    }
  }

  void add(Crew &crew, const Linear &linear, const Activations &in, int first, int last) {
    crew.each((int)linear.blocks, crew.share((int)linear.blocks), [&](int from, int to) {
      for (int block = from; block < to; block++)
        multiply(linear, block, in, first, last, [&](int r, F v) {
          float *at = w.x + r * m.hidden + block * LANES;
          store(at, load<F>(at) + v);
        });
    });
    crew.sync();
  }

  // 32 outputs of the MLP's first half: two blocks of gates and the two of their factors, then SiLU and quantization.
  void gate(const Linear &linear, int unit, int first, int last) {
    for (int from = first; from < last; from += SOLO_ROWS) {
      F out[4][SOLO_ROWS];
      int to = std::min(last, from + SOLO_ROWS);
      for (int part = 0; part < 4; part++)
        multiply(linear, 4 * unit + part, w.narrow, from, to, [&](int r, F v) { out[part][r - from] = v; });
      for (int r = from; r < to; r++) {
        F a = out[0][r - from], c = out[1][r - from];
        a = a / (1.0f + vexp(-a)) * out[2][r - from];
        c = c / (1.0f + vexp(-c)) * out[3][r - from];
        w.wide.put(r, unit, a, c);
      }
    }
  }

  // Logits of rows [first, last) of `picked`, at w.logits.
  void head(Crew &crew, const int *picked, int count) {
    crew.each(count, 1, [&](int from, int to) {
      for (int i = from; i < to; i++) norm_row(w.x + picked[i] * m.hidden, m.final_norm, w.last, i);
    });
    crew.sync();
    const int64_t width = m.head.blocks * LANES;
    crew.each((int)m.head.blocks, crew.share((int)m.head.blocks), [&](int from, int to) {
      for (int block = from; block < to; block++)
        multiply(m.head, block, w.last, 0, count, [&](int r, F v) { store(w.logits + r * width + block * LANES, v); });
    });
    crew.sync();
  }

  void sample(Crew &crew, int first, int last) {
    head(crew, drawn.data() + first, last - first);
    crew.each(last - first, 1, [&](int from, int to) {
      for (int i = from; i < to; i++)
        sample_row(rows[drawn[first + i]], w.logits + i * m.head.blocks * LANES, w.thread_scratch + crew.rank * w.scratch_floats);
    });
    crew.sync();
  }

  void sample_row(const Row &row, const float *logits, float *z) {
    const int slot = row.slot, lane = row.lane, size = (int)m.vocab, wanted = s.logprobs[slot];
    if (!copy_finite(logits, m.head.blocks * LANES, z)) {
      b.token[lane] = NOT_FINITE;
      return;
    }
    adjust(z, slot, lane);
    Cuts cuts{s.min_p[slot], s.top_p[slot], s.top_k[slot]};
    int token = draw(z, size, s.temperature[slot], cuts, draw_key((uint64_t)s.seed[slot], (uint64_t)s.committed[slot]));
    b.token[lane] = token;
    if (wanted >= 0)
      b.logprob[lane] = logprobs(logits, token, wanted, b.top_tokens + lane * b.alternatives_max,
                                 b.top_logprobs + lane * b.alternatives_max);
    s.pending[slot] = token;
    s.committed[slot]++;
    s.remaining[slot]--;
    const int32_t *stops = s.stop_tokens + slot * s.stop_tokens_max;
    if (std::find(stops, stops + s.stop_count[slot], token) != stops + s.stop_count[slot]) s.ended[slot] = ENDED_STOP;
    else if (s.remaining[slot] <= 0) s.ended[slot] = ENDED_LENGTH;
  }

  void adjust(float *logits, int slot, int lane) {
    for (int i = 0; i < b.banned_count[lane]; i++) logits[b.banned[lane * b.banned_max + i]] = -INFINITY;
    for (int i = 0; i < s.bias_count[slot]; i++)
      logits[s.bias_tokens[slot * s.bias_max + i]] += s.bias_values[slot * s.bias_max + i];
    for (int i = 0; i < b.seen[lane]; i++) {
      float &v = logits[b.history_tokens[lane * b.history_max + i]];
      float count = (float)b.history_counts[lane * b.history_max + i];
      v = v > 0 ? v / s.repetition[slot] : v * s.repetition[slot];
      v -= s.frequency[slot] * count;
      v -= count > 0 ? s.presence[slot] : 0;
    }
  }

  // Score the targets of all prompt rows, `logits_rows` of them at a time.
  void score(Crew &crew) {
    const int64_t width = m.head.blocks * LANES;
    for (int first = 0; first < (int)rows.size(); first += (int)w.logits_rows) {
      int picked[64], count = std::min({64, (int)w.logits_rows, (int)rows.size() - first});
      for (int i = 0; i < count; i++) picked[i] = first + i;
      head(crew, picked, count);
      crew.each(count, 1, [&](int from, int to) {
        for (int i = from; i < to; i++) score_row(first + i, w.logits + i * width);
      });
      crew.sync();
    }
  }

  void score_row(int r, const float *logits) {
    if (b.targets[r] < 0) return;
    const int wanted = std::max(0, s.prompt_logprobs[rows[r].slot]);
    b.row_logprob[r] = logprobs(logits, b.targets[r], wanted, b.row_top_tokens + r * b.alternatives_max,
                                b.row_top_logprobs + r * b.alternatives_max);
  }

  // Log-probability of `token`; the best `wanted` ones go to `top_tokens` and `top`.
  float logprobs(const float *logits, int token, int wanted, int32_t *top_tokens, float *top) {
    const int size = (int)m.vocab;
    float normalizer = log_sum_exp(logits, size, argmax(size, [&](int i, I) { return load<F>(logits + i); }).value);
    alternatives(logits, size, normalizer, wanted, top_tokens, top);
    return logits[token] - normalizer;
  }

  FlareModel m;
  FlareRows s;
  FlareBuffers b;
  FlareSpace w;
  Team team;
  std::vector<Row> rows;
  std::vector<int> drawn;
};

} // namespace

extern "C" {
void *flare_open(const FlareModel *model, const FlareRows *rows, const FlareBuffers *buffers, const FlareSpace *space, int threads) {
  return new Step(*model, *rows, *buffers, *space, threads);
}
int64_t flare_decode(void *step, int lanes) { return ((Step *)step)->decode(lanes); }
int64_t flare_prefill(void *step, int lanes, int scored) { return ((Step *)step)->prefill(lanes, scored != 0); }
void flare_close(void *step) { delete (Step *)step; }
}
