// The engine over real processes: deaths, restarts, and the end of the tree.
#include <gtest/gtest.h>

#include <csignal>
#include <random>
#include <thread>

#include "engine_world.h"
#include "hierarchical/workers/worker_manager.h"

namespace simpler {
namespace {

using graph::Outcome;
using testing::wait_until;
using testing::watchdog;

enum Order : std::uint32_t { kNothing, kDie, kStay };

class ChildSide : public ChildHandler {
 public:
  void control(const ChildRequest&, ReplyWriter& reply) noexcept override {
    reply.write(ReplyStatus::kOk, {});
  }
  void task(std::uint32_t order, std::span<const std::byte> args,
            ReplyWriter& reply) noexcept override {
    if (order == kDie) raise(SIGKILL);
    while (order == kStay) pause();
    reply.write(ReplyStatus::kOk, args);
  }
  void replied() noexcept override {}
};

class Forked : public TreeListener {
 public:
  explicit Forked(int chips) : manager(options(chips), *this) {
    manager.start(
        [](const ChildContext& context) {
          ChildSide handler;
          ChildLoop loop(context.memory.header(), context.child.block, context.memory.payload(),
                         context.memory.space(context.child.index), context.child.seat,
                         context.spin_ns, handler);
          loop.run();
          return 0;
        },
        {}, {}, watchdog(), [] { return nullptr; });
    std::vector<ChildProcess*> children;
    for (int i = 0; i < chips; ++i) children.push_back(&manager.child(i));
    engine = std::make_unique<TaskEngine>(TaskEngineConfig{}, manager.memory().header(),
                                          std::move(children));
  }
  ~Forked() override {
    engine->close();
    manager.stop(Deadline::after_seconds(1));
  }

  SubmittedTask submit(EngineRunId run, std::uint32_t chip, Order order,
                       std::vector<graph::TaskId> deps = {}) {
    const std::uint32_t targets[] = {chip};
    TaskDesc desc;
    desc.callable_id = order;
    desc.spec.targets = targets;
    desc.spec.deps = deps;
    desc.is_kept = true;
    return engine->submit(run, {}, desc, watchdog(), nullptr);
  }
  TaskResult result(const SubmittedTask& task) {
    EXPECT_EQ(engine->wait_task(task, watchdog(), nullptr), TaskWait::kOk);
    return engine->take_result(task);
  }

  void child_died(int worker, const std::string& how) override { engine->worker_lost(worker, how); }
  void child_logged(int, std::vector<std::byte>) override {}
  std::string name_of_request(ControlOp, std::uint32_t) override { return "a request"; }
  std::string name_of_task(std::uint32_t) override { return "a task"; }

  WorkerManager manager;
  std::unique_ptr<TaskEngine> engine;

 private:
  static TreeOptions options(int chips) {
    TreeOptions made;
    for (int i = 0; i < chips; ++i) made.device_ids.push_back(i);
    made.max_payload = std::size_t{1} << 16;
    made.heap_bytes = 4096;
    return made;
  }
};

TEST(TaskEngineProcesses, ManyTasksOverTwoChipsAndBackAgain) {
  Forked tree(2);
  for (int round = 0; round < 20; ++round) {
    const EngineRunId run = tree.engine->open_run();
    graph::TaskId last;
    for (std::uint32_t i = 0; i < 200; ++i) {
      const SubmittedTask task = tree.submit(run, i / 3 % 2, kNothing, {last});
      tree.engine->forget(task);
      last = task.id;
    }
    tree.engine->seal_run(run);
    ASSERT_EQ(tree.engine->wait_run(run, watchdog(), nullptr), TaskWait::kOk);
    EXPECT_EQ(tree.engine->take_run(run).counts.tasks, 200U);
  }
  EXPECT_EQ(tree.engine->counts().records, 0U);
}

TEST(TaskEngineProcesses, CP3_ADeadChipFailsWhatItOwedAndOnlyThat) {
  Forked tree(2);
  const EngineRunId run = tree.engine->open_run();
  const EngineRunId other = tree.engine->open_run();
  const SubmittedTask before = tree.submit(run, 0, kNothing);
  const SubmittedTask deadly = tree.submit(run, 0, kDie);
  const SubmittedTask behind = tree.submit(run, 0, kNothing);
  const SubmittedTask consumer = tree.submit(run, 1, kNothing, {behind.id});
  const SubmittedTask untouched = tree.submit(other, 1, kNothing, {before.id});
  EXPECT_EQ(tree.result(before).outcome, Outcome::kOk);
  const TaskResult lost = tree.result(deadly);
  EXPECT_EQ(lost.outcome, Outcome::kLost);
  EXPECT_EQ(lost.worker, 0U);
  ASSERT_NE(lost.failure, nullptr);
  EXPECT_NE(lost.failure->lost.find("SIGKILL"), std::string::npos) << lost.failure->lost;
  EXPECT_EQ(tree.result(behind).outcome, Outcome::kLost);
  EXPECT_EQ(tree.result(consumer).outcome, Outcome::kPoisoned);
  EXPECT_EQ(tree.result(untouched).outcome, Outcome::kOk);
  EXPECT_EQ(tree.result(tree.submit(other, 0, kNothing)).outcome, Outcome::kLost)
      << "also what is submitted later, until it is back";
  tree.engine->seal_run(run);
  EXPECT_EQ(tree.engine->wait_run(run, watchdog(), nullptr), TaskWait::kOk);
  const RunSummary summary = tree.engine->take_run(run);
  ASSERT_TRUE(summary.failure);
  EXPECT_EQ(summary.failure->task, deadly.id);
  EXPECT_EQ(summary.counts.failed, 2U);
}

TEST(TaskEngineProcesses, ARestartedChipTakesTasksAgain) {
  Forked tree(1);
  for (int round = 0; round < 3; ++round) {
    const EngineRunId run = tree.engine->open_run();
    EXPECT_EQ(tree.result(tree.submit(run, 0, kDie)).outcome, Outcome::kLost);
    tree.manager.restart(0, watchdog(), nullptr);
    tree.engine->worker_back(0);
    for (int i = 0; i < 100; ++i) {
      EXPECT_EQ(tree.result(tree.submit(run, 0, kNothing)).outcome, Outcome::kOk);
    }
    tree.engine->seal_run(run);
    tree.engine->wait_run(run, watchdog(), nullptr);
    tree.engine->take_run(run);
  }
}

TEST(TaskEngineProcesses, AChipKilledAtAnyMomentLeavesNobodyWaiting) {
  Forked tree(2);
  for (int round = 0; round < 20; ++round) {
    const EngineRunId run = tree.engine->open_run();
    graph::TaskId last;
    std::thread killer([&] { tree.manager.kill(1); });
    for (std::uint32_t i = 0; i < 300; ++i) {
      const SubmittedTask task = tree.submit(run, i % 2, kNothing, {last});
      tree.engine->forget(task);
      if (i % 50 == 0) last = task.id;
    }
    tree.engine->seal_run(run);
    ASSERT_EQ(tree.engine->wait_run(run, watchdog(), nullptr), TaskWait::kOk);
    const RunSummary summary = tree.engine->take_run(run);
    EXPECT_EQ(summary.counts.tasks, 300U);
    killer.join();
    tree.manager.restart(1, watchdog(), nullptr);
    tree.engine->worker_back(1);
  }
}

// A task of a random graph, and those before it in the graph.
struct Drawn {
  SubmittedTask task;
  std::vector<std::uint32_t> chips;
  std::vector<std::size_t> before;
};

std::vector<Drawn> submit_random_graph(Forked& tree, EngineRunId run, std::mt19937& random) {
  std::vector<Drawn> graph(20 + random() % 150);
  for (std::size_t i = 0; i < graph.size(); ++i) {
    Drawn& drawn = graph[i];
    drawn.chips.push_back(random() % 2);
    if (random() % 8 == 0) drawn.chips.push_back(1 - drawn.chips[0]);
    std::vector<graph::TaskId> deps;
    for (std::uint64_t edge = random() % 4; i != 0 && edge != 0; --edge) {
      drawn.before.push_back(random() % i);
      deps.push_back(graph[drawn.before.back()].task.id);
    }
    TaskDesc desc;
    desc.callable_id = kNothing;
    desc.spec.targets = drawn.chips;
    desc.spec.deps = deps;
    desc.is_kept = true;
    drawn.task = tree.engine->submit(run, {}, desc, watchdog(), nullptr);
  }
  return graph;
}

TEST(TaskEngineProcesses, CP3_TG3_OverRandomGraphsADeathFailsItsOwnTasksAndTheirConsumersAlone) {
  Forked tree(2);
  std::mt19937 random(1);
  std::size_t lost = 0;
  for (int round = 0; round < 200; ++round) {
    const EngineRunId run = tree.engine->open_run();
    std::thread killer([&, spins = random() % 3000] {
      for (std::atomic<std::uint64_t> i{0}; i < spins; ++i) {
      }
      tree.manager.kill(1);
    });
    const std::vector<Drawn> graph = submit_random_graph(tree, run, random);
    tree.engine->seal_run(run);
    ASSERT_EQ(tree.engine->wait_run(run, watchdog(), nullptr), TaskWait::kOk) << round;
    std::vector<Outcome> outcomes;
    for (const Drawn& drawn : graph) {
      const Outcome outcome = tree.engine->take_result(drawn.task).outcome;
      const bool has_bad = std::ranges::any_of(
          drawn.before, [&](std::size_t i) { return outcomes[i] != Outcome::kOk; });
      const bool is_bound = std::ranges::count(drawn.chips, 1U) != 0;
      // An id may have been reused only by what had ended well, so an edge lost is one fulfilled.
      if (outcome == Outcome::kLost) {
        EXPECT_TRUE(is_bound) << round;
      } else {
        EXPECT_EQ(outcome, has_bad ? Outcome::kPoisoned : Outcome::kOk) << round;
      }
      lost += outcome == Outcome::kLost ? 1 : 0;
      outcomes.push_back(outcome);
    }
    tree.engine->take_run(run);
    killer.join();
    tree.manager.restart(1, watchdog(), nullptr);
    tree.engine->worker_back(1);
    ASSERT_EQ(tree.engine->counts().records, 0U) << round;
  }
  EXPECT_GT(lost, 0U);
}

TEST(TaskEngineProcesses, LC2_CloseEndsARunWhoseTaskNeverEnds) {
  Forked tree(1);
  const EngineRunId run = tree.engine->open_run();
  const SubmittedTask endless = tree.submit(run, 0, kStay);
  const SubmittedTask behind = tree.submit(run, 0, kNothing);
  std::thread waiter(
      [&] { EXPECT_EQ(tree.engine->wait_run(run, Deadline::never(), nullptr), TaskWait::kOk); });
  tree.engine->close();
  waiter.join();
  EXPECT_EQ(tree.engine->take_result(endless).outcome, Outcome::kLost);
  EXPECT_EQ(tree.engine->take_result(behind).outcome, Outcome::kLost);
}

}  // namespace
}  // namespace simpler
