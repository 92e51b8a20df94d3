// The engine over children in this process, so that sanitizers see both sides.
#include <gtest/gtest.h>

#include <thread>

#include "engine_world.h"
#include "hierarchical/base/error.h"

namespace simpler {
namespace {

using graph::Outcome;
using testing::EngineTestWorld;
using testing::kEcho;
using testing::kFail;
using testing::kFirstFree;
using testing::kHold;
using testing::kNow;
using testing::reads;
using testing::text_of;
using testing::watchdog;
using testing::writes;

TEST(TaskEngine, IndependentTasksOfTwoChipsAllRunAndNothingIsLeft) {
  const EngineTestWorld world(2);
  const EngineRunId run = world->engine->open_run();
  std::vector<std::uint32_t> targets(1);
  TaskDesc desc;
  desc.callable_id = kFirstFree;
  desc.spec.targets = targets;
  world->engine->submit_many(
      run, {}, 5000,
      [&](std::size_t i) -> const TaskDesc& {
        targets[0] = i % 2;
        return desc;
      },
      watchdog(), nullptr);
  const RunSummary summary = world->finish(run);
  EXPECT_EQ(summary.counts.tasks, 5000U);
  EXPECT_FALSE(summary.failure);
  EXPECT_EQ(world->ran(0).size() + world->ran(1).size(), 5000U);
  const TaskEngine::Counts counts = world->engine->counts();
  EXPECT_EQ(counts.unfinished + counts.unsent + counts.records, 0U);
}

TEST(TaskEngine, AResultComesBackWholeWhateverTheSizeOfTheArguments) {
  const EngineTestWorld world(1, 1);
  const EngineRunId run = world->engine->open_run();
  for (const std::size_t size : {std::size_t{0}, std::size_t{9}, kTaskInlineBytes,
                                 kTaskInlineBytes + 1, std::size_t{100'000}}) {
    const std::string args(size, 'a');
    for (const graph::Kind kind : {graph::Kind::kNextLevel, graph::Kind::kSub}) {
      const std::uint32_t targets[] = {0};
      TaskDesc desc;
      desc.spec.kind = kind;
      if (kind == graph::Kind::kNextLevel) desc.spec.targets = targets;
      desc.args = testing::bytes_of(args);
      desc.is_kept = true;
      const TaskResult result = world->result(world->submit(run, desc));
      EXPECT_EQ(result.outcome, Outcome::kOk);
      EXPECT_EQ(text_of(result.bytes), args) << size;
      EXPECT_EQ(result.worker, kind == graph::Kind::kSub ? 1U : 0U);
    }
  }
}

TEST(TaskEngine, ArgumentsBeyondTheArenaAreRefusedAndAFullOneMakesSubmittersWait) {
  const EngineTestWorld world(1);
  const EngineRunId run = world->engine->open_run();
  const std::uint32_t targets[] = {0};
  TaskDesc desc;
  desc.callable_id = kHold;
  desc.spec.targets = targets;
  const std::vector<std::byte> beyond(world->tree.manager().child(0).arena.capacity() + 1);
  desc.args = beyond;
  EXPECT_THROW(world->submit(run, desc), Error);
  desc.args = std::span(beyond).first(beyond.size() / 2);
  world->submit(run, desc);
  world->holding.wait();
  desc.args = std::span(beyond).first(beyond.size() * 3 / 4);
  EXPECT_THROW(world->engine->submit(run, {}, desc, kNow, nullptr), CallError);
  std::thread later([&] { world->submit(run, desc); });
  world->hold.open();
  later.join();
  EXPECT_EQ(world->finish(run).counts.tasks, 2U);
}

TEST(TaskEngine, TG1_AChainOnOneChipRunsInOrder) {
  const EngineTestWorld world(1);
  const EngineRunId run = world->engine->open_run();
  for (std::uint32_t i = 0; i < 1000; ++i)
    world->engine->forget(world->on_chip(run, 0, kFirstFree + i, {writes(0, 8)}));
  world->finish(run);
  const std::vector<std::uint32_t> order = world->ran(0);
  ASSERT_EQ(order.size(), 1000U);
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
}

TEST(TaskEngine, TG1_AChainThatAlternatesBetweenChipsWaitsForEachEnd) {
  const EngineTestWorld world(2);
  const EngineRunId run = world->engine->open_run();
  std::atomic<std::uint32_t> next{kFirstFree};
  std::atomic<int> wrong{0};
  for (const auto& handlers : world->handlers) {
    handlers->on_task = [&](std::uint32_t id, std::span<const std::byte>, ReplyWriter& reply) {
      if (next.fetch_add(1) != id) wrong.fetch_add(1);
      reply.write(ReplyStatus::kOk, {});
    };
  }
  for (std::uint32_t i = 0; i < 500; ++i)
    world->engine->forget(world->on_chip(run, i % 2, kFirstFree + i, {writes(0, 8)}));
  EXPECT_EQ(world->finish(run).counts.tasks, 500U);
  EXPECT_EQ(wrong.load(), 0);
}

TEST(TaskEngine, TG2_TG3_AFailureInsideARingSkipsItsConsumersAlone) {
  const EngineTestWorld world(2);
  const EngineRunId run = world->engine->open_run();
  const EngineRunId other = world->engine->open_run();
  world->on_chip(run, 0, kHold);  // everything below is in the ring before anything of it runs
  world->holding.wait();
  const SubmittedTask good = world->on_chip(run, 0, kEcho, {writes(8, 16)});
  const SubmittedTask failed = world->on_chip(run, 0, kFail, {writes(0, 8)});
  const SubmittedTask elsewhere = world->on_chip(run, 0, 20, {reads(8, 16)});
  const SubmittedTask skipped =
      world->on_chip(run, 0, 21, {reads(0, 8), reads(8, 16), writes(16, 24)});
  const SubmittedTask skipped_too = world->on_chip(run, 0, 22, {reads(16, 24)});
  const SubmittedTask foreign = world->on_chip(other, 0, 23, {reads(0, 8)});
  const SubmittedTask poisoned = world->on_chip(run, 1, 24, {reads(16, 24)});
  EXPECT_EQ(world->engine->counts().unsent, 1U) << "only what waits for another chip";
  world->hold.open();
  EXPECT_EQ(world->result(good).outcome, Outcome::kOk);
  const TaskResult failure = world->result(failed);
  EXPECT_EQ(failure.outcome, Outcome::kFailed);
  ASSERT_NE(failure.failure, nullptr);
  EXPECT_EQ(decode_failure(failure.failure->failure).message, "no");
  EXPECT_EQ(world->result(elsewhere).outcome, Outcome::kOk);
  EXPECT_EQ(world->result(skipped).outcome, Outcome::kPoisoned);
  EXPECT_EQ(world->result(skipped_too).outcome, Outcome::kPoisoned);
  EXPECT_EQ(world->result(foreign).outcome, Outcome::kOk);
  EXPECT_EQ(world->result(poisoned).outcome, Outcome::kPoisoned);
  EXPECT_EQ(world->ran(0), (std::vector<std::uint32_t>{kHold, kEcho, kFail, 20, 23}));
  const RunSummary summary = world->finish(run);
  EXPECT_EQ(summary.counts.poisoned, 3U);
  ASSERT_TRUE(summary.failure);
  EXPECT_EQ(summary.failure->task, failed.id);
  EXPECT_EQ(summary.failure->callable_id, static_cast<std::uint32_t>(kFail));
  EXPECT_EQ(decode_failure(summary.failure->failure).type_name, "ValueError");
  EXPECT_FALSE(world->finish(other).failure);
}

TEST(TaskEngine, TG5_AGroupRunsOnAllItsChipsWithItsOwnArguments) {
  const EngineTestWorld world(2, 2);
  const EngineRunId run = world->engine->open_run();
  const std::string texts[] = {"one", std::string(3000, '2')};
  const std::span<const std::byte> args[] = {testing::bytes_of(texts[0]),
                                             testing::bytes_of(texts[1])};
  world->on_chip(run, 0, kHold);
  world->holding.wait();
  const SubmittedTask before = world->on_chip(run, 0, kEcho, {writes(0, 8)});
  const std::uint32_t targets[] = {1, 0};
  const graph::Access accesses[] = {writes(0, 8)};
  TaskDesc desc;
  desc.spec.targets = targets;
  desc.spec.accesses = accesses;
  desc.member_args = args;
  desc.is_kept = true;
  const SubmittedTask group = world->submit(run, desc);
  EXPECT_FALSE(world->engine->poll_task(group));
  world->hold.open();
  const TaskResult result = world->result(group);
  ASSERT_EQ(result.members.size(), 2U);
  EXPECT_EQ(text_of(result.members[0]), texts[0]);
  EXPECT_EQ(text_of(result.members[1]), texts[1]);
  desc.spec.kind = graph::Kind::kSub;
  desc.spec.targets = {};
  desc.spec.sub_members = 2;
  const TaskResult subs = world->result(world->submit(run, desc));
  ASSERT_EQ(subs.members.size(), 2U);
  EXPECT_EQ(text_of(subs.members[1]), texts[1]);
  EXPECT_TRUE(world->engine->poll_task(before));
  desc.member_args = std::span(args).first(1);
  EXPECT_THROW(world->submit(run, desc), Error);
}

TEST(TaskEngine, TG6_TwoThreadsSubmitAndWaitForTheirOwnRuns) {
  const EngineTestWorld world(2, 1);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (std::uint32_t index = 0; index < 4; ++index) {
    threads.emplace_back([&, index] {
      for (int round = 0; round < 50; ++round) {
        const EngineRunId run = world->engine->open_run();
        const std::uint64_t at = 8 * std::uint64_t{index};
        const bool fails = index % 2 == 1;
        world->engine->forget(world->on_chip(run, round % 2, kFirstFree, {writes(at, at + 8)}));
        const SubmittedTask middle =
            world->on_chip(run, 1, fails ? kFail : kEcho, {writes(at, at + 8)});
        const SubmittedTask last = world->on_chip(run, 0, kEcho, {reads(at, at + 8)});
        const RunSummary summary = world->finish(run);
        if (summary.counts.failed != (fails ? 1U : 0U)) wrong.fetch_add(1);
        if (summary.counts.poisoned != (fails ? 1U : 0U)) wrong.fetch_add(1);
        if ((world->result(middle).outcome == Outcome::kFailed) != fails) wrong.fetch_add(1);
        if ((world->result(last).outcome == Outcome::kPoisoned) != fails) wrong.fetch_add(1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong.load(), 0);
  EXPECT_EQ(world->engine->counts().records, 0U);
}

TEST(TaskEngine, CancelStopsWhatHasNotBegunAndWaitsForWhatHas) {
  const EngineTestWorld world(1);
  const EngineRunId run = world->engine->open_run();
  const SubmittedTask held = world->on_chip(run, 0, kHold);
  world->holding.wait();
  std::vector<SubmittedTask> others;
  for (int i = 0; i < 200; ++i) others.push_back(world->on_chip(run, 0, kEcho));
  world->engine->cancel_run(run);
  EXPECT_FALSE(world->engine->poll_task(held));
  EXPECT_FALSE(world->engine->poll_run(run));
  world->hold.open();
  EXPECT_EQ(world->result(held).outcome, Outcome::kOk);
  for (const SubmittedTask& task : others)
    EXPECT_EQ(world->result(task).outcome, Outcome::kCancelled);
  const RunSummary summary = world->finish(run);
  EXPECT_TRUE(summary.counts.was_cancelled);
  EXPECT_EQ(summary.counts.cancelled, 200U);
  EXPECT_EQ(world->ran(0), std::vector<std::uint32_t>{kHold});
}

TEST(TaskEngine, WhatABusySubWorkerHasNotBegunGoesToOneThatIdles) {
  const EngineTestWorld world(0, 2);
  const EngineRunId run = world->engine->open_run();
  TaskDesc desc;
  desc.spec.kind = graph::Kind::kSub;
  desc.is_kept = true;
  desc.callable_id = kHold;
  const SubmittedTask held = world->submit(run, desc);
  world->holding.wait();
  std::vector<SubmittedTask> others;
  std::vector<std::string> args;
  for (int i = 0; i < 200; ++i) args.push_back("task " + std::to_string(i));
  desc.callable_id = kEcho;
  for (const std::string& one : args) {
    desc.args = testing::bytes_of(one);
    others.push_back(world->submit(run, desc));
  }
  for (std::size_t i = 0; i < others.size(); ++i)
    EXPECT_EQ(text_of(world->result(others[i]).bytes), args[i]);
  EXPECT_FALSE(world->engine->poll_task(held));
  EXPECT_TRUE(world->ran(0).empty() || world->ran(1).empty()) << "the one that is held ran none";
  world->hold.open();
  const RunSummary summary = world->finish(run);
  EXPECT_EQ(summary.counts.tasks, 201U);
  EXPECT_FALSE(summary.failure);
  EXPECT_EQ(world->engine->counts().unfinished, 0U);
}

TEST(TaskEngine, WhatIsTakenBackIsSharedAlsoWhenNobodyWaits) {
  const EngineTestWorld world(0, 2);
  const EngineRunId run = world->engine->open_run();
  TaskDesc desc;
  desc.spec.kind = graph::Kind::kSub;
  desc.callable_id = kHold;
  world->submit(run, desc);
  world->holding.wait();
  desc.callable_id = kFirstFree;
  for (int i = 0; i < 8; ++i) world->submit(run, desc);
  world->engine->seal_run(run);
  const Deadline limit = watchdog();
  while (world->engine->counts().ended < 8 && !limit.passed()) std::this_thread::yield();
  EXPECT_EQ(world->engine->counts().ended, 8U);
  world->hold.open();
}

TEST(TaskEngine, ATaskOfTheHostHasItsTurnBetweenThoseOfTheChips) {
  const EngineTestWorld world(1);
  const EngineRunId run = world->engine->open_run();
  world->on_chip(run, 0, kHold, {writes(0, 8)});
  const graph::Access accesses[] = {writes(0, 8)};
  TaskDesc desc;
  desc.spec.kind = graph::Kind::kHost;
  desc.spec.accesses = accesses;
  const SubmittedTask copy = world->submit(run, desc);
  const SubmittedTask after = world->on_chip(run, 0, kEcho, {reads(0, 8)});
  bool is_its_turn = true;
  EXPECT_EQ(world->engine->wait_turn(copy, kNow, nullptr, is_its_turn), TaskWait::kTimedOut);
  EXPECT_THROW(world->engine->end_host_task(copy, {}), Error);
  world->hold.open();
  EXPECT_EQ(world->engine->wait_turn(copy, watchdog(), nullptr, is_its_turn), TaskWait::kOk);
  EXPECT_TRUE(is_its_turn);
  EXPECT_FALSE(world->engine->poll_task(after));
  world->engine->end_host_task(copy, testing::bytes_of("failure"));
  EXPECT_EQ(world->result(after).outcome, Outcome::kPoisoned);
  const SubmittedTask poisoned = world->submit(run, desc);
  EXPECT_EQ(world->engine->wait_turn(poisoned, watchdog(), nullptr, is_its_turn), TaskWait::kOk);
  EXPECT_FALSE(is_its_turn);
  EXPECT_EQ(world->finish(run).counts.failed, 1U);
}

TEST(TaskEngine, ABufferIsIdleOnceReleasedAndUnused) {
  const EngineTestWorld world(1);
  const EngineRunId run = world->engine->open_run();
  const graph::BufferId buffer = world->engine->open_buffer();
  const std::uint32_t targets[] = {0};
  const graph::BufferId buffers[] = {buffer};
  TaskDesc desc;
  desc.callable_id = kHold;
  desc.spec.targets = targets;
  desc.spec.buffers = buffers;
  world->submit(run, desc);
  world->engine->release_buffer(buffer);
  EXPECT_TRUE(world->engine->take_idle_buffers().empty());
  world->hold.open();
  world->finish(run);
  EXPECT_EQ(world->engine->take_idle_buffers(), std::vector<graph::BufferId>{buffer});
}

TEST(TaskEngine, CP4_WhatIsSubmittedForLostWorkersNamesTheOneThatIsMissing) {
  const EngineTestWorld world(2, 1);
  const EngineRunId run = world->engine->open_run();
  world->engine->worker_lost(2, "the sub worker died");
  world->engine->worker_lost(1, "chip 1 died");
  const TaskResult on_chip = world->result(world->on_chip(run, 1, kEcho));
  EXPECT_EQ(on_chip.outcome, Outcome::kLost);
  ASSERT_NE(on_chip.failure, nullptr);
  EXPECT_EQ(on_chip.failure->lost, "chip 1 died");
  TaskDesc desc;
  desc.spec.kind = graph::Kind::kSub;
  desc.is_kept = true;
  EXPECT_EQ(world->result(world->submit(run, desc)).failure->lost, "the sub worker died");
  EXPECT_EQ(world->result(world->on_chip(run, 0, kEcho)).outcome, Outcome::kOk);
  const RunSummary summary = world->finish(run);
  ASSERT_TRUE(summary.failure);
  EXPECT_EQ(summary.failure->lost, "chip 1 died") << "the first cause";
  world->engine->worker_back(1);
  const EngineRunId again = world->engine->open_run();
  EXPECT_EQ(world->result(world->on_chip(again, 1, kEcho)).outcome, Outcome::kOk);
}

TEST(TaskEngine, ALargeResultIsTakenOutOfTheArena) {
  const EngineTestWorld world(1);
  const EngineRunId run = world->engine->open_run();
  world->handlers[0]->on_task = [](std::uint32_t id, std::span<const std::byte>,
                                   ReplyWriter& reply) {
    reply.write(ReplyStatus::kOk, std::vector<std::byte>(1000 * id));
  };
  for (std::uint32_t round = 0; round < 100; ++round) {
    EXPECT_EQ(world->result(world->on_chip(run, 0, 200)).bytes.size(), 200'000U);
  }
  EXPECT_TRUE(world->result(world->on_chip(run, 0, 0)).bytes.empty());
}

}  // namespace
}  // namespace simpler
