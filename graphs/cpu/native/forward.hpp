// The forward pass of one network over packed rows, down to logits.
//
// Owns the order of work and who does it; a step's target and its draft are two of these. Memory belongs to the caller;
// the layouts are those of programs/rows.py, programs/buffers.py and memory/pages.py, but for the order within a page
// (attention.hpp). Surprising rule: few rows are shared out by outputs among all threads with a barrier after each part;
// many rows are shared out by rows, each thread taking a block of them through a whole layer.
#pragma once
#include "gemm.hpp"
#include "records.hpp"
#include "team.hpp"
#include "tiles.hpp"
#include <algorithm>

namespace flare {

constexpr int TEAM_ROWS = 16, SOLO_ROWS = 40; // for each thread; of each block
constexpr int RUN_QUERIES = 12; // of rows that attend together without tiles
constexpr int PHASES_PER_LAYER = 9; // calls of Crew::each by the whole team in `project` and `mix`
constexpr int LOGITS_ROWS_MAX = 64;

struct Row { // `packed` is its place in the inputs, `hidden` what a draft head reads beside the token
  int token, position, slot, lane, packed;
  const float *hidden = nullptr;
};
struct Run { // rows of one lane that attend together
  int first, last;
};
struct Block { // rows that one crew takes through a layer, and their runs
  int first, last, first_run, last_run;
};

class Forward {
public:
  Forward(const FlareModel &model, const FlareSpace &space, const FlareRows &rows) : m(model), w(space), s(rows) {}

  const FlareModel m;
  const FlareSpace w;
  std::vector<Row> rows; // rows of a lane stand together, in order

  // Calls of Crew::each that a pass over `most` rows with logits of all takes.
  int phases() const { return PHASES_PER_LAYER * (int)m.layers + 6 + 6 * (1 + (int)(w.rows_max / w.logits_rows)); }
  const float *residual(int row) const { return w.x + row * m.hidden; }
  int64_t logits_width() const { return m.head.blocks * LANES; }
  const float *logits(int row) const { return w.logits + row * logits_width(); }
  float *scratch(const Crew &crew) const { return w.thread_scratch + crew.rank * w.scratch_floats; }

  // Run all `rows` through the layers, once they are cut.
  void layers(Crew &crew) {
    if (blocks.size() == 1) together(crew);
    else by_rows(crew);
    crew.sync();
  }

  // Blocks of rows, and within each the runs of at most as many rows of a lane as fill an attention tile.
  void cut(int threads) {
    const int n = (int)rows.size(), turn = threads * SOLO_ROWS;
    const int count = n <= TEAM_ROWS * threads ? 1 : threads * ((n + turn - 1) / turn); // as many for each thread
    const int height = std::max(1, (tiles ? TILE_QUERIES : RUN_QUERIES) / (int)(m.heads / m.kv_heads));
    blocks.clear();
    runs.clear();
    for (int i = 0; i < count; i++) {
      const int first = n * i / count, last = n * (i + 1) / count, first_run = (int)runs.size();
      for (int from = first, to; from < last; from = to) {
        for (to = from + 1; to < last && to - from < height && rows[to].lane == rows[from].lane;) to++;
        runs.push_back({from, to});
      }
      blocks.push_back({first, last, first_run, (int)runs.size()});
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

private:
  int query_width() const { return (int)(m.heads * m.head_dim); }
  int qkv_width() const { return (int)((m.heads + 2 * m.kv_heads) * m.head_dim); }

  void together(Crew &crew) {
    const Block &all = blocks[0];
    embed(crew, all);
    crew.sync();
    for (int l = 0; l < m.layers; l++) {
      project(crew, l, all);
      crew.sync();
      mix(crew, l, all);
    }
  }

  // One barrier per layer: attention reads what all rows of the chunk have stored.
  void by_rows(Crew &crew) {
    auto share = [&](auto part) {
      crew.each((int)blocks.size(), 1, [&](int i, int) {
        Crew solo{nullptr, crew.rank};
        part(solo, blocks[blocks.size() - 1 - i]); // the last rows see the most keys: begin with them
      });
      crew.sync();
    };
    share([&](Crew &solo, const Block &block) {
      embed(solo, block);
      project(solo, 0, block);
    });
    for (int l = 0; l < m.layers; l++)
      share([&](Crew &solo, const Block &block) {
        mix(solo, l, block);
        if (l + 1 < m.layers) project(solo, l + 1, block);
      });
  }

  void embed(Crew &crew, const Block &block) {
    if (m.fuse.data) return fuse(crew, block.first, block.last);
    crew.each(block.last - block.first, 1, [&](int from, int to) {
      for (int r = block.first + from; r < block.first + to; r++)
        weight_row(m.embedding, rows[r].token, w.x + r * m.hidden);
    });
  }

  // What a draft head begins with: the token's embedding and the hidden state before it, each normalized, in one product.
  void fuse(Crew &crew, int first, int last) {
    crew.each(last - first, 1, [&](int from, int to) {
      float *embedding = w.thread_scratch + crew.rank * w.scratch_floats;
      for (int r = first + from; r < first + to; r++) {
        weight_row(m.embedding, rows[r].token, embedding);
        norm_row(embedding, m.embedding_norm, w.fused, r);
        norm_row(rows[r].hidden, m.hidden_norm, w.fused, r, (int)m.hidden / GROUP);
      }
    });
    crew.sync();
    crew.each((int)m.fuse.blocks, crew.share((int)m.fuse.blocks), [&](int from, int to) {
      for (int block = from; block < to; block++)
        multiply(m.fuse, block, w.fused, first, last, [&](int r, F v) { store(w.x + r * m.hidden + block * LANES, v); });
    });
  }

  void norm(Crew &crew, const Activations &to, const float *weight, int first, int last) {
    crew.each(last - first, 1, [&](int from, int until) {
      for (int r = first + from; r < first + until; r++) norm_row(w.x + r * m.hidden, weight, to, r);
    });
    crew.sync();
  }

  void norm_row(const float *x, const float *weight, const Activations &to, int row, int g = 0) {
    F squares{};
    for (int i = 0; i < m.hidden; i += LANES) {
      F v = load<F>(x + i);
      squares += v * v;
    }
    float scale = 1.0f / std::sqrt(sum(squares) / (float)m.hidden + (float)m.norm_eps);
    for (int i = 0; i < m.hidden; i += GROUP, g++)
      to.put(row, g, load<F>(x + i) * scale * load<F>(weight + i),
             load<F>(x + i + LANES) * scale * load<F>(weight + i + LANES));
  }

  // Queries, keys and values of a block's rows; keys and values go to their pages.
  void project(Crew &crew, int l, const Block &part) {
    const FlareLayer &layer = m.layer[l];
    const int first = part.first, last = part.last;
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
    const float *k = w.qkv + (int64_t)r * qkv_width() + query_width(), *v = k + m.kv_heads * d;
    for (int h = 0; h < m.kv_heads; h++) paged(l, rows[r].slot, h).put(position, d, k + h * d, v + h * d);
  }

  PagedHead paged(int l, int slot, int kv_head) const {
    const int64_t size = m.head_dim * PAGE, base = (l * w.pages * m.kv_heads + kv_head) * size;
    return {w.keys + base, w.values + base, m.kv_heads * size, s.page_table + slot * s.table_pages};
  }

  // Attention, output and MLP of a block's rows, added to the residual stream.
  void mix(Crew &crew, int l, const Block &part) {
    const FlareLayer &layer = m.layer[l];
    const int first = part.first, last = part.last, heads = (int)m.kv_heads;
    crew.each((part.last_run - part.first_run) * heads, 1, [&](int from, int to) {
      for (int task = from; task < to; task++) {
        const Run &run = runs[part.first_run + task / heads];
        if (tiles) attend_run<TILE_QUERIES>(crew.rank, l, run, task % heads);
        else attend_run<QUERIES>(crew.rank, l, run, task % heads);
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

  // A run's queries of one key head, at most N at a time.
  template <int N> void attend_run(int rank, int l, const Run &run, int kv_head) {
    const int d = (int)m.head_dim, group = (int)(m.heads / m.kv_heads), count = (run.last - run.first) * group;
    float *packed = w.thread_scratch + rank * w.scratch_floats, *scores = packed + N * d;
    const PagedHead kv = paged(l, rows[run.first].slot, kv_head);
    Queries<N> qs;
    for (int i = 0, held = 0; i < count; i++) {
      const int r = run.first + i / group, h = kv_head * group + i % group;
      qs.query[held] = w.qkv + (int64_t)r * qkv_width() + h * d;
      qs.out[held] = w.attended + (int64_t)r * query_width() + h * d;
      qs.last[held++] = rows[r].position;
      if (held < N && i + 1 < count) continue;
      if constexpr (N == TILE_QUERIES) attend_tiles(qs, held, kv, d, (int)m.window, scores, packed);
      else ATTEND.of[held - 1](qs, kv, d, (int)m.window, scores, packed);
      held = 0;
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

  const FlareRows &s;
  const bool tiles = tiles_permitted();
  std::vector<Run> runs;
  std::vector<Block> blocks;
};

} // namespace flare
