// The draft: what proposes tokens within a step, and what it must be told afterwards.
//
// Owns the proposals of a round, and the hidden states and tokens that wait in the state rows until the draft has read
// them. Does not own what is accepted. Surprising rule: what was verified is not read at once but with the next
// proposals, or when a row has no room for more: rounds that propose nothing cost a copy and no pass of the draft.
#pragma once
#include "forward.hpp"
#include "sampling.hpp"
#include <cstring>

namespace flare {

struct Lane { // of one frame: `first` is its first row in the target, `depth` the proposals that it makes
  int lane, slot, start, packed, width, depth = 0, first = 0;
  bool prompt = false;
  int32_t *proposals(const FlareBuffers &b) const { return b.tokens + packed + 1; } // given or made
};

class Draft {
public:
  Draft(const FlareModel &model, const FlareSpace &space, const FlareRows &rows, const FlareBuffers &buffers, Team &team)
      : net(model, space, rows), s(rows), b(buffers), team(team), carry(64 * model.hidden), picked(64) {}

  // Make each lane's proposals, with their confidence.
  void propose(std::vector<Lane> &lanes, bool rejects) {
    catch_up(lanes);
    for (int step = 0; !proposing.empty(); step++) {
      forward();
      const int count = (int)proposing.size();
      team.run([&](int rank) {
        Crew crew{&team, rank};
        TileUnit unit(tiles);
        net.head(crew, picked.data(), count);
        crew.each(count, 1, [&](int from, int to) {
          for (int i = from; i < to; i++) draw_one(*proposing[i], step, i, net.scratch(crew), rejects);
        });
      });
      chain(step);
    }
  }

  // Read what a prompt's chunk brought: rows of the target that has just run.
  void read_prompts(const std::vector<Lane> &lanes, const Forward &target) {
    net.rows.clear();
    for (const Lane &lane : lanes) {
      if (!lane.prompt) continue;
      const int slot = lane.slot, last = lane.width - 1;
      const int32_t *tokens = b.tokens + lane.packed;
      if (heads()) {
        put_waiting(lane, tokens[0]);
        for (int i = 0; i < last; i++) put(lane, tokens[i + 1], lane.start + i, target.residual(lane.first + i));
        s.drafted[slot] = lane.start + last;
        keep(slot, tokens[last], target.residual(lane.first + last));
      } else {
        for (int i = 0; i <= last; i++) put(lane, tokens[i], lane.start + i, nullptr);
        s.drafted[slot] = lane.start + lane.width;
      }
    }
    forward();
  }

  // Keep what a round of `lane` committed: its first `count` rows.
  void keep_round(const Lane &lane, int count, const Forward &target) {
    const int slot = lane.slot;
    int from = 0;
    if (!heads() && lane.depth) { // the pending token and accepted proposals were read as they were proposed
      from = std::min(count, lane.depth);
      s.drafted[slot] = lane.start + from;
    }
    for (int j = from; j < count; j++) keep(slot, target.rows[lane.first + j].token, target.residual(lane.first + j));
  }

private:
  bool heads() const { return net.m.fuse.data != nullptr; }

  // Rows for all that waits in lanes that propose, or that have no room for another round.
  void catch_up(std::vector<Lane> &lanes) {
    net.rows.clear();
    proposing.clear();
    for (Lane &lane : lanes) {
      const int slot = lane.slot, pending = s.pending[slot];
      if (lane.prompt || (!lane.depth && s.waiting[slot] + lane.width <= s.waiting_max)) continue;
      const size_t before = net.rows.size();
      put_waiting(lane, pending);
      if (!heads() && lane.depth) put(lane, pending, lane.start, nullptr);
      if (net.rows.size() == before) lane.depth = 0, lane.width = 1; // its last round failed
      if (!lane.depth) continue;
      proposing.push_back(&lane);
      picked[proposing.size() - 1] = (int)net.rows.size() - 1;
    }
    if (proposing.empty()) forward();
  }

  // A head reads each hidden state with the token that followed it, a model each token by itself.
  void put_waiting(const Lane &lane, int next) {
    const int slot = lane.slot, count = s.waiting[slot];
    const int32_t *tokens = s.waiting_tokens + slot * s.waiting_max;
    const float *hidden = s.waiting_hidden + slot * s.waiting_max * net.m.hidden;
    for (int i = 0; i < count; i++) {
      const int token = !heads() ? tokens[i] : i + 1 < count ? tokens[i + 1] : next;
      put(lane, token, s.drafted[slot] + i, heads() ? hidden + i * net.m.hidden : nullptr);
    }
    s.drafted[slot] += count;
    s.waiting[slot] = 0;
  }

  void put(const Lane &lane, int token, int position, const float *hidden) {
    net.rows.push_back({token, position, lane.slot, lane.lane, 0, hidden});
  }

  void keep(int slot, int token, const float *hidden) {
    const int64_t at = slot * s.waiting_max + s.waiting[slot]++;
    s.waiting_tokens[at] = token;
    if (heads()) std::memcpy(s.waiting_hidden + at * net.m.hidden, hidden, net.m.hidden * sizeof(float));
  }

  void forward() {
    if (net.rows.empty()) return;
    net.cut(team.size());
    team.run([&](int rank) {
      Crew crew{&team, rank};
      TileUnit unit(tiles);
      net.layers(crew);
    });
  }

  // Proposals that are accepted by their probability are as likely as the likeliest: how many are verified must not
  // depend on which were drawn.
  void draw_one(const Lane &lane, int step, int row, float *z, bool rejects) {
    const int slot = lane.slot, size = (int)net.m.vocab;
    const float *logits = net.logits(row), temperature = s.temperature[slot];
    const Cuts cuts{s.min_p[slot], s.top_p[slot], s.top_k[slot]};
    const uint64_t key = draw_key((uint64_t)s.seed[slot] ^ (rejects ? DRAFT_SALT : 0), (uint64_t)(s.committed[slot] + step));
    float *q = rejects && temperature > 0 ? b.draft_probabilities + (lane.lane * b.depth_max + step) * size : nullptr;
    std::memcpy(z, logits, size * sizeof(float));
    const int drawn = draw(z, size, temperature, cuts, key, net.m.kept, q);
    float top = -INFINITY;
    const float scale = temperature > 0 ? 1.0f / temperature : 1.0f;
    for (int i = 0; i < size; i++) top = std::max(top, z[i] = logits[i] * scale);
    const float likely = std::min(1.0f, std::exp((q ? top : z[drawn]) - log_sum_exp(z, size, top)));
    float *conditional = b.confidence + slot * b.depth_max, *joint = conditional + b.slots * b.depth_max;
    conditional[step] = likely == likely ? likely : 0.0f;
    joint[step] = (step ? joint[step - 1] : 1.0f) * conditional[step];
    lane.proposals(b)[step] = net.m.kept ? net.m.kept[drawn] : drawn;
  }

  // The next rows of the lanes that propose on, each behind its own last proposal and hidden state.
  void chain(int step) {
    std::vector<Lane *> on;
    for (size_t i = 0; i < proposing.size(); i++) {
      if (step + 1 >= proposing[i]->depth) continue;
      std::memcpy(carry.data() + on.size() * net.m.hidden, net.residual(picked[i]), net.m.hidden * sizeof(float));
      on.push_back(proposing[i]);
    }
    net.rows.clear();
    for (size_t i = 0; i < on.size(); i++) {
      const int position = on[i]->start + step + (heads() ? 0 : 1);
      put(*on[i], on[i]->proposals(b)[step], position, heads() ? carry.data() + i * net.m.hidden : nullptr);
      picked[i] = (int)i;
    }
    proposing.swap(on);
  }

public:
  Forward net;

private:
  const FlareRows &s;
  const FlareBuffers &b;
  Team &team;
  const bool tiles = tiles_permitted();
  std::vector<float> carry;
  std::vector<int> picked;
  std::vector<Lane *> proposing;
};

} // namespace flare
