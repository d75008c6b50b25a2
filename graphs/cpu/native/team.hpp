// The threads of one step.
//
// Owns a fixed team of threads, a barrier, and shared counters from which chunks of work are claimed, so that a thread
// that loses its core holds up one chunk alone. Surprising rule: every member runs the same sequence of `each` and
// `sync`; a `Crew` of one runs the same code without either.
#pragma once
#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace flare {

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

struct alignas(64) Counter {
  std::atomic<int> next{0};
};

class Team {
public:
  Team(int threads, int phases) : threads_(threads), phases_(phases), counters_(new Counter[phases]) {
    for (int rank = 1; rank < threads; rank++) members_.emplace_back([this, rank] { serve(rank); });
  }
  ~Team() {
    stop_ = true;
    wake();
    for (auto &member : members_) member.join();
  }
  int size() const { return threads_; }

  // Run `work(rank)` on every member, the calling thread being rank 0; returns when all are done.
  void run(const std::function<void(int)> &work) {
    for (int i = 0; i < phases_; i++) counters_[i].next.store(0, std::memory_order_relaxed);
    work_ = &work;
    running_.store(threads_ - 1, std::memory_order_relaxed);
    wake();
    work(0);
    wait([this] { return running_.load(std::memory_order_acquire) == 0; });
  }

  int claim(int phase) { return counters_[phase].next.fetch_add(1, std::memory_order_relaxed); }

  void barrier() {
    if (threads_ == 1) return;
    unsigned round = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
    } else {
      wait([&] { return round_.load(std::memory_order_acquire) != round; });
    }
  }

private:
  static constexpr int SPINS = 60; // a few microseconds; then let whoever else needs the core have it

  template <class Ready> static void wait(Ready ready) {
    for (int spin = 0; !ready(); spin++)
      if (spin < SPINS) relax();
      else std::this_thread::yield();
  }
  void wake() {
    start_.fetch_add(1, std::memory_order_release);
    start_.notify_all();
  }
  void serve(int rank) {
    for (unsigned seen = 0;;) {
      for (int spin = 0; spin < SPINS && start_.load(std::memory_order_acquire) == seen; spin++) relax();
      start_.wait(seen, std::memory_order_acquire);
      seen = start_.load(std::memory_order_acquire);
      if (stop_) return;
      (*work_)(rank);
      running_.fetch_sub(1, std::memory_order_release);
    }
  }

  int threads_, phases_;
  std::unique_ptr<Counter[]> counters_;
  std::vector<std::thread> members_;
  const std::function<void(int)> *work_ = nullptr;
  std::atomic<bool> stop_{false};
  alignas(64) std::atomic<unsigned> start_{0};
  alignas(64) std::atomic<int> running_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<unsigned> round_{0};
};

// One member's view of those who work on the same rows: the whole team, or (without a team) the member alone.
struct Crew {
  Team *team;
  int rank;
  int phase = 0;

  // Run f(first, last) over [0, count) in chunks of `chunk`, shared among the crew.
  template <class Work> void each(int count, int chunk, Work work) {
    if (!team) {
      work(0, count);
      return;
    }
    int mine = phase++;
    for (int first; (first = team->claim(mine) * chunk) < count;) work(first, first + chunk < count ? first + chunk : count);
  }
  void sync() const {
    if (team) team->barrier();
  }
  // A chunk that gives each member about four turns.
  int share(int count) const {
    int turns = team ? 4 * team->size() : 1;
    return count > turns ? (count + turns - 1) / turns : 1;
  }
};

} // namespace flare
