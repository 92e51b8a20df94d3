// An engine over children that are threads of this process and do what the callable's id says.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "hierarchical/ipc/error_codec.h"
#include "hierarchical/runtime.h"
#include "hierarchical/sched/task_engine.h"
#include "in_process_child.h"

namespace simpler::testing {

inline const Deadline kNow = Deadline::at(0);
inline constexpr std::uint32_t kFirstFree = 10;  // callables that do nothing

enum Callable : std::uint32_t { kEcho, kFail, kHold };  // others do nothing

// What an engine tells, remembered.
class Heard : public EngineListener {
 public:
  void run_done(EngineRunId /*run*/) override {}
  void buffers_idle() override {}
  void turn_came(graph::TaskId task) override {
    const std::lock_guard lock(mutex_);
    turns_.push_back(task);
  }
  std::vector<graph::TaskId> turns() {
    const std::lock_guard lock(mutex_);
    return turns_;
  }

 private:
  std::mutex mutex_;
  std::vector<graph::TaskId> turns_;
};

struct EngineWorld {
  explicit EngineWorld(int chips, int subs = 0, const TaskEngineConfig& engine_config = config())
      : tree(options(chips, subs)) {
    std::vector<simpler::ChildProcess*> children;
    for (int i = 0; i < chips + subs; ++i) {
      children.push_back(&tree.manager().child(i));
      handlers.push_back(std::make_unique<Handlers>());
      handlers.back()->on_task = [this, i](std::uint32_t id, std::span<const std::byte> args,
                                           ReplyWriter& reply) { run(i, id, args, reply); };
      loops.push_back(std::make_unique<LoopThread>(tree.manager().memory(), *children.back(),
                                                   Nanoseconds{5'000}, *handlers.back()));
      loops.back()->start();
    }
    engine = std::make_unique<TaskEngine>(engine_config, tree.manager().memory().header(),
                                          std::move(children), &heard);
  }
  static TreeOptions options(int chips, int subs) {
    TreeOptions made;
    for (int i = 0; i < chips; ++i) made.device_ids.push_back(i);
    made.num_sub_workers = subs;
    made.max_payload = std::size_t{1} << 18;
    made.heap_bytes = 4096;
    made.spin_ns = 5'000;
    return made;
  }
  static TaskEngineConfig config() {
    TaskEngineConfig made;
    made.spin_ns = 5'000;
    return made;
  }

  SubmittedTask submit(EngineRunId run, TaskDesc desc) {
    return engine->submit(run, {}, desc, watchdog(), nullptr);
  }
  // On one chip, writing `bytes` of region 0 if any, after `deps`.
  SubmittedTask on_chip(EngineRunId run, std::uint32_t chip, std::uint32_t callable,
                        std::vector<graph::Access> accesses = {},
                        std::vector<graph::TaskId> deps = {}) {
    TaskDesc desc;
    const std::uint32_t targets[] = {chip};
    desc.callable_id = callable;
    desc.spec.targets = targets;
    desc.spec.accesses = accesses;
    desc.spec.deps = deps;
    desc.is_kept = true;
    return submit(run, desc);
  }
  TaskResult result(const SubmittedTask& task) {
    EXPECT_EQ(engine->wait_task(task, watchdog(), nullptr), TaskWait::kOk);
    return engine->take_result(task);
  }
  RunSummary finish(EngineRunId run) {
    engine->seal_run(run);
    EXPECT_EQ(engine->wait_run(run, watchdog(), nullptr), TaskWait::kOk);
    return engine->take_run(run);
  }
  std::vector<std::uint32_t> ran(int child) {
    const std::lock_guard lock(mutex);
    return order[child];
  }

  void run(int child, std::uint32_t id, std::span<const std::byte> args, ReplyWriter& reply) {
    if (id == kHold) {
      holding.open();
      hold.wait();
    }
    {
      const std::lock_guard lock(mutex);
      order[child].push_back(id);
    }
    if (id == kFail) {
      reply.write(ReplyStatus::kFailure, encode_failure({"ValueError", "no", "", false}));
    } else {
      reply.write(ReplyStatus::kOk, id == kEcho ? args : std::span<const std::byte>());
    }
  }

  Gate hold;     // kHold tasks end once it is open
  Gate holding;  // opened by the first of them
  Heard heard;
  std::mutex mutex;
  std::map<int, std::vector<std::uint32_t>> order;  // callables that ran, by child
  RunningTree tree;
  std::vector<std::unique_ptr<Handlers>> handlers;
  std::vector<std::unique_ptr<LoopThread>> loops;
  std::unique_ptr<TaskEngine> engine;
};

// What a service thread of a child still looks at must outlive the test; the engine and the loops
// end with this.
class EngineTestWorld {
 public:
  template <typename... Args>
  explicit EngineTestWorld(Args&&... args)
      : world_(make_immortal<EngineWorld>(std::forward<Args>(args)...)) {}
  ~EngineTestWorld() {
    world_.hold.open();
    world_.engine->close();
    for (const auto& loop : world_.loops) loop->stop();
  }
  EngineWorld* operator->() const { return &world_; }

 private:
  EngineWorld& world_;
};

inline graph::Access writes(std::uint64_t begin, std::uint64_t end) {
  return {0, graph::Mode::kWrite, begin, end};
}
inline graph::Access reads(std::uint64_t begin, std::uint64_t end) {
  return {0, graph::Mode::kRead, begin, end};
}

}  // namespace simpler::testing
