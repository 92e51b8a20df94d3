// Runs the threads of a small model in every order that matters, and says which one breaks it.
//
// A test gives a setup function that builds fresh state over ModelAtom (atom.h) and names the
// threads. Each operation on a ModelAtom, each futex call and each join is a point where the
// explorer chooses who goes on. An execution is a list of such choices; the next one repeats its
// prefix and differs in the last choice that has an alternative left (depth first, with replay from
// the start). Executions with few preemptions come first: switching away from a thread that could
// go on costs one, and at most Options::preemptions are spent. Most protocol errors need one or
// two. Where that is too shallow, random_runs tries that many schedules at random, without a bound,
// from a seed that a report repeats.
//
// Modelled:
// - sequentially consistent interleaving of all operations, threads that end, and one thread that
// is killed between
//   any two of its operations (mortal), which is as good as at any moment later;
// - store buffers (Options::store_buffers), as on x86 and weaker: a store that is not seq_cst stays
// in its thread's
//   buffer, where only that thread sees it, and reaches memory at any later time, which is chosen
//   when another thread comes to that word; relaxed stores to different words may pass each other,
//   a release store passes nothing. Read-modify-writes, seq_cst stores and system calls empty the
//   buffer first. A Dekker pattern without its seq_cst order shows as a lost wake-up;
// - happens-before by vector clocks: the test marks what the threads do to plain fields (Guarded in
// atom.h), and two
//   accesses that no release and acquire order are a race, whatever the interleaving;
// - futex: compare and sleep as one step, wake of n in every choice of who, and as far as Options
// allows time-outs,
//   spurious returns and signals at any moment. A wait with a deadline ends when nothing else can
//   happen.
// Not modelled: loads that return older values than memory holds or pass each other, mixed sizes,
// priority, fairness. A spinning loop must be bounded by the test; an execution of more than
// max_steps is a livelock.
//
// Reported: a check that fails, a deadlock (a lost wake-up is one), a race, a livelock; each with
// its schedule.
//
// Thread safety: one explorer at a time, in one thread of the process. The setup and the bodies
// must be deterministic but for what the explorer decides.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "model/fiber.h"
#include "model/memory.h"

namespace simpler::model {

enum class Failure { kNone, kCheck, kDeadlock, kRace, kLivelock };

struct Options {
  int preemptions = 3;
  int timeouts =
      0;  // waits with a deadline that may end although something else could still happen
  int spurious = 0;    // futex waits that may return for no reason
  int signals = 0;     // futex waits that may return kInterrupted
  int weak_fails = 0;  // compare_exchange_weak that may fail for no reason
  bool store_buffers = false;
  std::uint64_t random_runs = 0;  // 0: depth first
  std::uint64_t seed = 1;
  int max_steps = 3000;
};

struct Verdict {
  Failure failure = Failure::kNone;
  std::string report;  // what failed and the schedule that led there
  std::uint64_t executions = 0;

  [[nodiscard]] bool good() const { return failure == Failure::kNone; }
};

// Sanitizers watch memory, not orders, and are slow: under them less is explored.
constexpr int at_most(int preemptions) { return kSanitized ? preemptions - 1 : preemptions; }
constexpr std::uint64_t at_most_runs(std::uint64_t runs) { return kSanitized ? runs / 20 : runs; }

class Explorer;

// What setup tells the explorer about one execution.
class Scenario {
 public:
  // Returns the thread's number, for join().
  int thread(std::string name, std::function<void()> body) {
    return add(std::move(name), std::move(body), false, false);
  }
  // May sleep for ever once all other threads have ended.
  int daemon(std::string name, std::function<void()> body) {
    return add(std::move(name), std::move(body), true, false);
  }
  // A daemon that may be killed at any point; what it wrote before stays written.
  int mortal(std::string name, std::function<void()> body) {
    return add(std::move(name), std::move(body), true, true);
  }
  // Runs when all threads have ended or sleep, with every store in memory.
  void finally(std::function<void()> check) { finally_ = std::move(check); }

 private:
  friend class Explorer;
  int add(std::string name, std::function<void()> body, bool daemon, bool mortal);
  explicit Scenario(Explorer& explorer) : explorer_(explorer) {}
  Explorer& explorer_;
  std::function<void()> finally_;
};

inline Explorer* active =
    nullptr;  // the explorer whose execution this is; null in a test with real threads

class Explorer {
 public:
  using Setup = std::function<void(Scenario&)>;

  Explorer(Options options, Setup setup)
      : options_(options), setup_(std::move(setup)), random_(options.seed) {}
  ~Explorer() = default;
  Explorer(const Explorer&) = delete;
  Explorer& operator=(const Explorer&) = delete;

  Verdict run();

  // The rest is for atom.h and Scenario.

  [[nodiscard]] bool in_thread() const { return running_ >= 0 && !aborting_; }
  std::uint64_t load(const Cell& cell, std::memory_order order);
  void store(Cell& cell, std::uint64_t value, std::memory_order order);
  // Runs `change` on the value in memory as one step and returns what it held; `change` returns
  // false to write nothing.
  std::uint64_t modify(Cell& cell, std::memory_order order, const char* what,
                       const std::function<bool(std::uint64_t&)>& change);
  FutexResult wait(const Cell& cell, std::uint64_t expected, bool has_deadline);
  void wake(const Cell& cell, int count);
  void join(int thread);
  void access(GuardState& guard, bool writes, const char* name);
  bool weak_fails();
  [[noreturn]] void fail(Failure failure, const std::string& message);

 private:
  friend class Scenario;
  struct Abort {};
  struct Killed {};
  enum class State { kReady, kBlocked, kJoining, kEnded };
  enum class Kind { kRun, kTimeout, kSpurious, kSignal, kKill };

  struct Thread {
    explicit Thread(Explorer& owner, int number)
        : explorer(owner), id(number), fiber(&Explorer::entry, this) {}
    Explorer& explorer;
    const int id;
    Fiber fiber;
    std::string name;
    std::function<void()> body;
    State state = State::kEnded;
    bool daemon = false, mortal = false, killed = false;
    bool fresh = false;  // was just chosen: its next operation needs no new choice
    bool has_deadline = false;
    const Cell* waits_on = nullptr;
    int joins = -1;
    FutexResult result = FutexResult::kWoken;
    Clock clock{};
    std::vector<BufferedStore> buffer;
  };

  struct Candidate {
    Kind kind;
    int thread;
    int cost;
  };

  struct Step {
    int chosen;
    int count;
  };

  static void entry(void* thread);
  void body_of(Thread& thread);
  void execute();
  void unwind();
  bool next_path();
  void explore_depth_first();
  void explore_at_random();
  void replay_for_report();
  void record(Failure failure, const std::string& message);

  void point();
  void reschedule();
  int pick();
  void collect();
  void collect_sleeper(const Thread& thread, int cost, bool idle);
  int apply(const Candidate& candidate);
  int end_of_run();
  int choose(int count);
  Thread& self() { return *threads_[static_cast<std::size_t>(running_)]; }
  Thread& at(int id) { return *threads_[static_cast<std::size_t>(id)]; }
  void enter(int id);
  void settle(const Cell& cell);
  void flush(Thread& thread, std::size_t entry);
  void flush_all(Thread& thread);
  void release_from(Cell& cell, Thread& thread, bool keep);
  void note(const std::string& text);
  std::string name_of(const Cell& cell);

  const Options options_;
  const Setup setup_;
  std::mt19937_64 random_;
  Fiber main_;
  std::vector<std::unique_ptr<Thread>>
      threads_;  // kept from one execution to the next, with their stacks
  int used_ = 0;
  int running_ = -1;
  int steps_ = 0;
  int bound_ = 0;
  int preemptions_left_ = 0, timeouts_left_ = 0, spurious_left_ = 0, signals_left_ = 0,
      weak_left_ = 0, kills_left_ = 0;
  bool aborting_ = false;
  bool at_random_ = false;
  bool tracing_ = false;
  std::vector<Step> path_;
  std::size_t depth_ = 0;
  std::vector<Candidate> candidates_;
  std::vector<std::string> trace_;
  std::vector<const Cell*> seen_cells_;
  Verdict verdict_;
};

// Fails the execution, or the test when no explorer runs.
void check(bool holds, const char* what);
// Until the thread has ended or was killed; what it did happens before what follows.
inline void join(int thread) { active->join(thread); }

inline Verdict explore(const Options& options, Explorer::Setup setup) {
  return Explorer(options, std::move(setup)).run();
}

}  // namespace simpler::model

#include "model/explorer_memory.h"
#include "model/explorer_schedule.h"
