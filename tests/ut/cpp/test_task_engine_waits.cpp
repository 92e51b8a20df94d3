// Who drives, who waits, and how waiting ends.
#include <gtest/gtest.h>

#include <thread>

#include "engine_world.h"
#include "hierarchical/base/error.h"

namespace simpler {
namespace {

using graph::Outcome;
using testing::EngineTestWorld;
using testing::EngineWorld;
using testing::kEcho;
using testing::kFirstFree;

using testing::kHold;
using testing::kNow;
using testing::wait_until;
using testing::watchdog;
using testing::writes;

TEST(TaskEngineWaits, AtItsDeadlineARunIsCancelledAlsoWhenNobodyWaits) {
  const EngineTestWorld world(1);
  const EngineRunId run = world->engine->open_run(0, Deadline::after_seconds(0.2));
  world->on_chip(run, 0, kHold);
  world->holding.wait();
  const SubmittedTask late = world->on_chip(run, 0, kEcho);
  // The thread of the engine looks; counts() does not drive.
  for (int i = 0; i < 200; ++i) world->engine->forget(world->on_chip(run, 0, kEcho));
  EXPECT_TRUE(wait_until([&] { return world->engine->counts().unsent == 0; }));
  world->hold.open();
  EXPECT_EQ(world->result(late).outcome, Outcome::kCancelled);
  EXPECT_TRUE(world->finish(run).was_timed_out);
}

TEST(TaskEngineWaits, TG4_AFullTableMakesSubmittersWaitWithinTheirDeadline) {
  TaskEngineConfig config = EngineWorld::config();
  config.window = 100;
  const EngineTestWorld world(1, 0, config);
  const EngineRunId run = world->engine->open_run();
  const std::uint32_t targets[] = {0};
  TaskDesc desc;
  desc.callable_id = kHold;
  desc.spec.targets = targets;
  for (int i = 0; i < 100; ++i) world->submit(run, desc);
  try {
    world->engine->submit(run, {}, desc, kNow, nullptr);
    ADD_FAILURE() << "taken";
  } catch (const CallError& error) {
    EXPECT_EQ(error.kind, CallError::Kind::kBackPressure);
    EXPECT_NE(error.message.find("100"), std::string::npos);
  }
  std::thread later([&] {
    for (int i = 0; i < 500; ++i) world->submit(run, desc);
  });
  world->hold.open();
  later.join();
  EXPECT_EQ(world->finish(run).counts.tasks, 600U);
}

TEST(TaskEngineWaits, WithoutWaitersItsOwnThreadDrivesAndLeavesOnceAllIsSent) {
  const EngineTestWorld world(2);
  const EngineRunId run = world->engine->open_run();
  for (std::uint32_t i = 0; i < 300; ++i)
    world->engine->forget(world->on_chip(run, i % 2, kFirstFree + i, {writes(0, 8)}));
  EXPECT_TRUE(wait_until([&] { return world->ran(1).size() == 150; }));
  EXPECT_EQ(world->engine->counts().unsent, 0U);
  EXPECT_GE(world->engine->counts().takeovers, 1U);
  world->finish(run);
}

TEST(TaskEngineWaits, ASingleTaskNeedsNoOtherThread) {
  const EngineTestWorld world(1, 1);
  const EngineRunId run = world->engine->open_run();
  for (int i = 0; i < 200; ++i) world->result(world->on_chip(run, 0, kEcho));
  world->finish(run);
  EXPECT_EQ(world->engine->counts().takeovers, 0U);
}

TEST(TaskEngineWaits, WaitersTakeTurnsAtDrivingWithoutLosingAWakeUp) {
  const EngineTestWorld world(2);
  const EngineRunId run = world->engine->open_run();
  std::vector<std::thread> threads;
  std::atomic<int> done{0};
  for (std::uint32_t index = 0; index < 6; ++index) {
    threads.emplace_back([&, index] {
      for (std::uint32_t i = 0; i < 200; ++i) {
        const SubmittedTask first = world->on_chip(run, (index + i) % 2, kEcho, {writes(0, 8)});
        const SubmittedTask task = world->on_chip(run, i % 2, kEcho, {}, {first.id});
        if (i % 3 == 0) world->engine->wait_task(first, kNow, nullptr);
        if (world->result(task).outcome == Outcome::kOk) done.fetch_add(1);
        world->engine->forget(first);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(done.load(), 1200);
  EXPECT_EQ(world->finish(run).counts.tasks, 2400U);
}

TEST(TaskEngineWaits, AWaitThatTimesOutOrIsInterruptedCancelsNothing) {
  const EngineTestWorld world(1);
  const EngineRunId run = world->engine->open_run();
  const SubmittedTask held = world->on_chip(run, 0, kHold);
  world->holding.wait();
  EXPECT_EQ(world->engine->wait_task(held, kNow, nullptr), TaskWait::kTimedOut);
  EXPECT_EQ(world->engine->wait_run(run, Deadline::after_seconds(0.001), nullptr),
            TaskWait::kTimedOut);
  testing::FakeInterrupt interrupt;
  interrupt.interrupt();
  EXPECT_EQ(world->engine->wait_task(held, watchdog(), &interrupt), TaskWait::kInterrupted);
  world->hold.open();
  EXPECT_EQ(world->result(held).outcome, Outcome::kOk);
}

TEST(TaskEngineWaits, LC4_AnInterruptIsSeenWhileTasksEndAllTheTime) {
  const EngineTestWorld world(1);
  const EngineRunId run = world->engine->open_run();
  testing::FakeInterrupt interrupt;
  std::atomic<bool> is_over{false};
  std::thread busy([&] {
    for (std::uint32_t i = 0; !is_over.load(); ++i) world->result(world->on_chip(run, 0, kEcho));
  });
  interrupt.interrupt();
  EXPECT_EQ(world->engine->wait_run(run, watchdog(), &interrupt), TaskWait::kInterrupted);
  is_over.store(true);
  busy.join();
}

TEST(TaskEngineWaits, LC4_AnInterruptStopsASubmissionOfManyBetweenTasks) {
  const EngineTestWorld world(1);
  const EngineRunId run = world->engine->open_run();
  testing::FakeInterrupt interrupt;
  const std::uint32_t targets[] = {0};
  TaskDesc desc;
  desc.callable_id = kFirstFree;
  desc.spec.targets = targets;
  const auto describe = [&](std::size_t i) -> const TaskDesc& {
    if (i == 0) interrupt.interrupt();
    return desc;
  };
  EXPECT_THROW(world->engine->submit_many(run, {}, 10'000, describe, watchdog(), &interrupt),
               CallError);
  const RunSummary summary = world->finish(run);
  EXPECT_LT(summary.counts.tasks, 10'000U);
  EXPECT_EQ(world->ran(0).size(), summary.counts.tasks);
}

TEST(TaskEngineWaits, WhatWorkOfTheHostReleasesIsSentAlsoWhileTheOnlyWaiterSleeps) {
  const EngineTestWorld world(1);
  const EngineRunId run = world->engine->open_run();
  for (int round = 0; round < 20; ++round) {
    const std::vector<graph::Access> bytes = {testing::writes(0, 8)};
    graph::Spec spec;
    spec.kind = graph::Kind::kHost;
    spec.accesses = bytes;
    const HostTask copy = world->engine->submit_host(spec, watchdog(), nullptr);
    const SubmittedTask behind = world->on_chip(run, 0, kFirstFree, {testing::reads(0, 8)});
    std::thread waiter([&] { EXPECT_EQ(world->result(behind).outcome, Outcome::kOk); });
    bool is_its_turn = false;
    EXPECT_EQ(world->engine->wait_turn(copy.task, watchdog(), nullptr, is_its_turn), TaskWait::kOk);
    EXPECT_TRUE(is_its_turn);
    world->engine->end_host(copy);
    waiter.join();
  }
}

TEST(TaskEngineWaits, AWatchedTurnIsToldOnceWhileNobodyWaits) {
  const EngineTestWorld world(1);
  const std::vector<graph::Access> bytes = {testing::writes(0, 8)};
  graph::Spec spec;
  spec.kind = graph::Kind::kHost;
  spec.accesses = bytes;
  const EngineRunId run = world->engine->open_run();
  world->on_chip(run, 0, kHold, {testing::writes(0, 8)});
  const HostTask behind = world->engine->submit_host(spec, watchdog(), nullptr);
  const HostTask last = world->engine->submit_host(spec, watchdog(), nullptr);
  EXPECT_FALSE(world->engine->watch_turn(behind.task));
  EXPECT_FALSE(world->engine->watch_turn(last.task));
  world->holding.wait();
  EXPECT_TRUE(world->heard.turns().empty());
  world->hold.open();
  EXPECT_TRUE(wait_until([&] { return !world->heard.turns().empty(); }));
  EXPECT_EQ(world->heard.turns(), std::vector{behind.task.id});
  EXPECT_TRUE(world->engine->watch_turn(behind.task)) << "it has come";
  world->engine->end_host(behind);
  EXPECT_EQ(world->heard.turns(), (std::vector{behind.task.id, last.task.id}));
  world->engine->end_host(last);
  EXPECT_TRUE(world->engine->watch_turn(last.task)) << "it has been";
  EXPECT_EQ(world->heard.turns().size(), 2U);
}

TEST(TaskEngineWaits, AWatchedTurnThatWillNeverComeIsToldToo) {
  const EngineTestWorld world(1);
  const std::vector<graph::Access> bytes = {testing::writes(0, 8)};
  graph::Spec spec;
  spec.kind = graph::Kind::kHost;
  spec.accesses = bytes;
  const HostTask first = world->engine->submit_host(spec, watchdog(), nullptr);
  const HostTask given_up = world->engine->submit_host(spec, watchdog(), nullptr);
  const HostTask closed = world->engine->submit_host(spec, watchdog(), nullptr);
  EXPECT_TRUE(world->engine->watch_turn(first.task));
  EXPECT_FALSE(world->engine->watch_turn(given_up.task));
  EXPECT_FALSE(world->engine->watch_turn(closed.task));
  world->engine->end_host(given_up);
  EXPECT_EQ(world->heard.turns(), std::vector{given_up.task.id});
  world->engine->close();
  EXPECT_EQ(world->heard.turns(), (std::vector{given_up.task.id, closed.task.id}));
}

TEST(TaskEngineWaits, CloseEndsEverythingAndWakesWhoeverWaits) {
  const EngineTestWorld world(2);
  const EngineRunId run = world->engine->open_run();
  const SubmittedTask held = world->on_chip(run, 0, kHold);
  const SubmittedTask waiting = world->on_chip(run, 1, kEcho, {}, {held.id});
  world->holding.wait();
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&, i] {
      if (i == 0) {
        EXPECT_EQ(world->engine->wait_run(run, Deadline::never(), nullptr), TaskWait::kOk);
      } else {
        EXPECT_EQ(world->engine->wait_task(i == 1 ? held : waiting, Deadline::never(), nullptr),
                  TaskWait::kOk);
      }
    });
  }
  world->engine->close();
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(world->engine->take_result(held).outcome, Outcome::kLost);
  EXPECT_EQ(world->engine->take_result(waiting).outcome, Outcome::kCancelled);
  EXPECT_EQ(world->engine->take_run(run).counts.tasks, 2U);
  EXPECT_THROW(world->on_chip(run, 0, kEcho), CallError);
  world->engine->close();
}

}  // namespace
}  // namespace simpler
