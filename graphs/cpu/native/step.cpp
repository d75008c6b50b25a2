// A whole step of a decoder in one call: proposals, forward pass, output projection, sampling, advance of the state rows.
//
// Owns which rows run, what is drawn for each and how far each lane gets. Does not own the passes (forward.hpp) or the
// proposals (draft.hpp). Surprising rule: every row of a lane is drawn for, as if all proposals before it had been
// accepted; only then is it seen which were. Prompts' rows come before all others, so that decoding beside a prompt breaks
// none of its tiles.
#include "draft.hpp"
#include <chrono>
#include <optional>

using namespace flare;

namespace {

enum { RUNNING = 0, ENDED_STOP = 1, ENDED_LENGTH = 2 };
enum { NO_TOKEN = -1, NOT_FINITE = -2 };

class Step {
public:
  Step(const FlareModel &model, const FlareSpace &space, const FlareModel *draft_model, const FlareSpace *draft_space,
       const FlareRows &rows, const FlareBuffers &buffers, int threads)
      : s(rows), b(buffers), net(model, space, s), team(threads, phases(net, draft_model, draft_space)) {
    if (draft_model) draft.emplace(*draft_model, *draft_space, s, b, team);
  }

  // `depth` proposals for each lane; `target_rows` to share out among the lanes, 0 if their widths are exact.
  int64_t step(int count, bool scored, int depth, int target_rows, bool rejecting) {
    auto began = std::chrono::steady_clock::now();
    rejects = rejecting;
    drafting = draft && depth > 0;
    gather(count, drafting ? depth : 0);
    if (draft) draft->propose(lanes, rejects);
    if (target_rows) allocate(target_rows);
    pack();
    if (!net.rows.empty()) run(scored);
    for (const Lane &lane : lanes) advance(lane);
    if (draft && b.prefill_row[0] >= 0) draft->read_prompts(lanes, net);
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - began).count();
  }

private:
  int phases(const Forward &target, const FlareModel *model, const FlareSpace *space) const {
    return std::max(target.phases(), model ? Forward(*model, *space, s).phases() : 0);
  }

  // Lanes that run: prompts first, then those that have not ended.
  void gather(int count, int depth) {
    lanes.clear();
    decoding.clear();
    int packed = 0, prompts = 0;
    for (int lane = 0; lane < count; packed += b.rows[lane++]) {
      const int slot = b.slot[lane], rows = b.rows[lane];
      b.count[lane] = b.verified[lane] = 0;
      b.token[lane * b.width_max] = NO_TOKEN;
      if (prompts < b.prompts_max && b.prefill_row[prompts] == lane) {
        prompts++;
        lanes.push_back({lane, slot, b.start[lane], packed, rows});
        lanes.back().prompt = true;
        s.committed[slot] = b.start[lane] + rows;
      } else if (s.ended[slot] == RUNNING) {
        const int width = std::min(rows, s.remaining[slot]);
        if (depth)
          for (int plane = 0; plane < 2; plane++)
            std::fill_n(b.confidence + (plane * b.slots + slot) * b.depth_max, b.depth_max, 0.0f);
        decoding.push_back({lane, slot, s.committed[slot] - 1, packed, width, std::min(depth, width - 1)});
      }
    }
    lanes.insert(lanes.end(), decoding.begin(), decoding.end());
  }

  // Every lane its pending token, then the most likely prefix of all that are left, the shorter and the first of equals.
  void allocate(int target_rows) {
    std::vector<Lane *> open;
    for (Lane &lane : lanes)
      if (!lane.prompt) {
        lane.width = 1;
        target_rows--;
        open.push_back(&lane);
      }
    for (; target_rows > 0; target_rows--) {
      Lane *best = nullptr;
      for (Lane *lane : open)
        if (lane->width <= lane->depth && (!best || before(*lane, *best))) best = lane;
      if (!best) return;
      best->width++;
    }
  }

  bool before(const Lane &a, const Lane &c) const {
    const float p = joint(a), q = joint(c);
    return p != q ? p > q : a.width != c.width ? a.width < c.width : a.slot < c.slot;
  }
  float joint(const Lane &lane) const { return b.confidence[(b.slots + lane.slot) * b.depth_max + lane.width - 1]; }

  // The rows of all lanes, and those that are drawn for.
  void pack() {
    net.rows.clear();
    drawn.clear();
    for (Lane &lane : lanes) {
      lane.first = (int)net.rows.size();
      for (int i = 0; i < lane.width; i++) {
        const int token = i || lane.prompt ? b.tokens[lane.packed + i] : s.pending[lane.slot];
        if (!lane.prompt || (i + 1 == lane.width && b.emits[lane.lane])) drawn.push_back({&lane, lane.prompt ? 0 : i, (int)net.rows.size()});
        net.rows.push_back({token, lane.start + i, lane.slot, lane.lane, lane.packed + i});
      }
    }
    net.cut(team.size());
  }

  void run(bool scored) {
    team.run([this, scored](int rank) {
      Crew crew{&team, rank};
      TileUnit unit(tiles);
      net.layers(crew);
      if (scored) score(crew);
      for (int first = 0; first < (int)drawn.size(); first += (int)net.w.logits_rows)
        sample(crew, first, std::min((int)drawn.size(), first + (int)net.w.logits_rows));
    });
  }

  struct Draw { // for a row of a lane, the `at`-th of its tokens
    const Lane *lane;
    int at, row;
  };

  void sample(Crew &crew, int first, int last) {
    int picked[LOGITS_ROWS_MAX] = {};
    for (int i = first; i < last; i++) picked[i - first] = drawn[i].row;
    net.head(crew, picked, last - first);
    crew.each(last - first, 1, [&](int from, int to) {
      for (int i = from; i < to; i++) sample_row(drawn[first + i], net.logits(i), net.scratch(crew));
    });
    crew.sync();
  }

  void sample_row(const Draw &of, const float *logits, float *z) {
    const Lane &lane = *of.lane;
    const int slot = lane.slot, size = (int)net.m.vocab, wanted = s.logprobs[slot];
    const int64_t at = lane.lane * b.width_max + of.at;
    if (!copy_finite(logits, net.logits_width(), z)) {
      b.token[at] = NOT_FINITE;
      b.survival[at] = 0;
      return;
    }
    adjust(z, lane, of.at);
    const Cuts cuts{s.min_p[slot], s.top_p[slot], s.top_k[slot]};
    const uint64_t key = draw_key((uint64_t)s.seed[slot], (uint64_t)(s.committed[slot] + of.at));
    const float temperature = s.temperature[slot];
    const int proposal = !lane.prompt && of.at + 1 < lane.width ? lane.proposals(b)[of.at] : NO_TOKEN;
    if (rejects && temperature > 0 && proposal != NO_TOKEN) {
      const bool made = drafting;
      const int q_size = made ? (int)draft->net.m.vocab : 0;
      const float *q = made ? b.draft_probabilities + (lane.lane * b.depth_max + of.at) * q_size : nullptr;
      const Judged judged = judge(z, size, temperature, cuts, key, proposal, q, q_size, made ? draft->net.m.kept : nullptr);
      b.token[at] = judged.token;
      b.survival[at] = judged.ratio;
    } else {
      b.token[at] = draw(z, size, temperature, cuts, key);
      b.survival[at] = b.token[at] == proposal ? 1.0f : 0.0f;
    }
    if (wanted >= 0)
      b.logprob[at] = logprobs(logits, b.token[at], wanted, b.top_tokens + at * b.alternatives_max, b.top_logprobs + at * b.alternatives_max);
  }

  // Bias, bans and penalties of the `at`-th token of a lane, as if the proposals before it had been output.
  void adjust(float *logits, const Lane &of, int at) {
    const int slot = of.slot, lane = of.lane;
    for (int i = 0; at < b.banned_rows[lane] && i < b.banned_count[lane]; i++) logits[b.banned[lane * b.banned_max + i]] = -INFINITY;
    for (int i = 0; i < s.bias_count[slot]; i++)
      logits[s.bias_tokens[slot * s.bias_max + i]] += s.bias_values[slot * s.bias_max + i];
    const int32_t *seen = b.history_tokens + lane * b.history_max, *ahead = of.proposals(b);
    auto penalize = [&](int token, int count) {
      float &v = logits[token];
      count += (int)std::count(ahead, ahead + at, token);
      v = v > 0 ? v / s.repetition[slot] : v * s.repetition[slot];
      v -= s.frequency[slot] * (float)count;
      v -= count > 0 ? s.presence[slot] : 0;
    };
    for (int i = 0; i < b.seen[lane]; i++) penalize(seen[i], b.history_counts[lane * b.history_max + i]);
    for (int i = 0; i < at; i++)
      if (std::find(ahead, ahead + i, ahead[i]) == ahead + i && std::find(seen, seen + b.seen[lane], ahead[i]) == seen + b.seen[lane])
        penalize(ahead[i], 0);
  }

  // Commit what was drawn for a lane, as far as its proposals were right.
  void advance(const Lane &lane) {
    const int slot = lane.slot, width = lane.prompt ? 1 : lane.width;
    const int64_t at = lane.lane * b.width_max;
    if (lane.prompt && !b.emits[lane.lane]) return;
    int count = 0;
    for (bool on = true; on;) {
      const int token = b.token[at + count++];
      if (token == NOT_FINITE) {
        b.token[at] = NOT_FINITE;
        return;
      }
      on = count < width && token == lane.proposals(b)[count - 1] && !stops(slot, token);
    }
    for (int i = 0; i < count; i++) commit(slot, b.token[at + i]);
    for (int i = 1; i < width; i++) b.survival[at + i] *= b.survival[at + i - 1];
    b.count[lane.lane] = count;
    b.verified[lane.lane] = lane.prompt ? 0 : lane.width;
    if (draft && !lane.prompt) draft->keep_round(lane, count, net);
  }

  void commit(int slot, int token) {
    s.pending[slot] = token;
    s.committed[slot]++;
    s.remaining[slot]--;
    if (stops(slot, token)) s.ended[slot] = ENDED_STOP;
    else if (s.remaining[slot] <= 0) s.ended[slot] = ENDED_LENGTH;
  }

  bool stops(int slot, int token) const {
    const int32_t *tokens = s.stop_tokens + slot * s.stop_tokens_max, *end = tokens + s.stop_count[slot];
    return std::find(tokens, end, token) != end;
  }

  // Score the targets of all rows, `logits_rows` of them at a time; every lane is a prompt.
  void score(Crew &crew) {
    for (int first = 0; first < (int)net.rows.size(); first += (int)net.w.logits_rows) {
      int picked[LOGITS_ROWS_MAX], count = std::min({LOGITS_ROWS_MAX, (int)net.w.logits_rows, (int)net.rows.size() - first});
      for (int i = 0; i < count; i++) picked[i] = first + i;
      net.head(crew, picked, count);
      crew.each(count, 1, [&](int from, int to) {
        for (int i = from; i < to; i++) score_row(first + i, net.logits(i));
      });
      crew.sync();
    }
  }

  void score_row(int r, const float *logits) {
    const int to = net.rows[r].packed, wanted = std::max(0, s.prompt_logprobs[net.rows[r].slot]);
    if (b.targets[to] < 0) return;
    b.row_logprob[to] = logprobs(logits, b.targets[to], wanted, b.row_top_tokens + to * b.alternatives_max,
                                 b.row_top_logprobs + to * b.alternatives_max);
  }

  // Log-probability of `token`; the best `wanted` ones go to `top_tokens` and `top`.
  float logprobs(const float *logits, int token, int wanted, int32_t *top_tokens, float *top) {
    const int size = (int)net.m.vocab;
    float normalizer = log_sum_exp(logits, size, argmax(size, [&](int i, I) { return load<F>(logits + i); }).value);
    alternatives(logits, size, normalizer, wanted, top_tokens, top);
    return logits[token] - normalizer;
  }

  const FlareRows s;
  const FlareBuffers b;
  Forward net;
  const bool tiles = tiles_permitted();
  Team team;
  std::optional<Draft> draft;
  bool rejects = false, drafting = false;
  std::vector<Lane> lanes, decoding;
  std::vector<Draw> drawn;
};

} // namespace

extern "C" {
void *flare_open(const FlareModel *model, const FlareSpace *space, const FlareModel *draft, const FlareSpace *draft_space,
                 const FlareRows *rows, const FlareBuffers *buffers, int threads) {
  return new Step(*model, *space, draft, draft_space, *rows, *buffers, threads);
}
int64_t flare_step(void *step, int lanes, int scored, int depth, int target_rows, int rejects) {
  return ((Step *)step)->step(lanes, scored != 0, depth, target_rows, rejects != 0);
}
void flare_close(void *step) { delete (Step *)step; }
}
