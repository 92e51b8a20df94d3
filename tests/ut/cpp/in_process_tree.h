// A tree whose children are threads of this process: its manager is never started, so nothing is
// forked, and calls, queues and broadcasts run as they do over processes.
#pragma once

#include <memory>
#include <thread>
#include <vector>

#include "hierarchical/runtime.h"
#include "in_process_child.h"

namespace simpler::testing {

struct InProcessTree {
  explicit InProcessTree(int chips) : tree(options(chips)) {
    for (int i = 0; i < chips; ++i) {
      handlers.push_back(std::make_unique<Handlers>());
      loops.push_back(std::make_unique<LoopThread>(tree.manager().memory(), tree.manager().child(i),
                                                   Nanoseconds{5'000}, *handlers.back()));
    }
  }

  static TreeOptions options(int chips) {
    TreeOptions made;
    for (int i = 0; i < chips; ++i) made.device_ids.push_back(i);
    made.max_payload = std::size_t{1} << 18;
    made.heap_bytes = 4096;
    made.spin_ns = 5'000;
    return made;
  }

  simpler::ChildProcess& child(int i) { return tree.manager().child(i); }
  void start() {
    for (const auto& loop : loops) loop->start();
  }
  void stop() {
    for (const auto& loop : loops) loop->stop();
  }

  RunningTree tree;
  std::vector<std::unique_ptr<Handlers>> handlers;
  std::vector<std::unique_ptr<LoopThread>> loops;
};

// Takes the tree's events on a thread of its own, as the binding's dispatcher does.
class Dispatcher {
 public:
  explicit Dispatcher(AsyncCalls& calls) : calls_(calls), thread_([this] { run(); }) {}
  ~Dispatcher() { finish(); }

  void finish() {
    if (!thread_.joinable()) return;
    calls_.finish();
    thread_.join();
  }
  std::vector<std::uint64_t> numbers(AsyncEvent::Kind kind) {
    const std::lock_guard lock(mutex_);
    std::vector<std::uint64_t> found;
    for (const AsyncEvent& event : events_) {
      if (event.kind == kind) found.push_back(event.number);
    }
    return found;
  }
  bool wait_for(AsyncEvent::Kind kind, std::size_t count) {
    return wait_until([&] { return numbers(kind).size() >= count; });
  }

 private:
  void run() {
    for (;;) {
      std::vector<AsyncEvent> taken = calls_.wait_events();
      if (taken.empty()) return;
      const std::lock_guard lock(mutex_);
      std::move(taken.begin(), taken.end(), std::back_inserter(events_));
    }
  }

  AsyncCalls& calls_;
  std::mutex mutex_;
  std::vector<AsyncEvent> events_;  // guarded by mutex_
  std::thread thread_;
};

}  // namespace simpler::testing
