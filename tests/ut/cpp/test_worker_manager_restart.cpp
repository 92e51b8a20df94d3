// Restarts through the spare, with real processes.
#include <gtest/gtest.h>

#include <csignal>
#include <thread>

#include "forked_tree.h"
#include "hierarchical/base/error.h"

namespace simpler {
namespace {

using testing::ForkedTree;
using testing::kShutdownBudgetS;
using testing::no_child_is_left;
using testing::Order;
using testing::wait_until;
using testing::watchdog;

TEST(WorkerManagerRestart, RestartBringsANewGenerationWithItsOwnCalls) {
  ForkedTree tree(2);
  tree.start();
  EXPECT_THROW(tree.manager.restart(0, watchdog(), nullptr), Error) << "it is alive";
  for (int round = 1; round <= 3; ++round) {
    EXPECT_THROW(tree.call(0, Order::kExit), CallError);
    EXPECT_NE(tree.manager.gone_error(0).message.find("exited with code 3"), std::string::npos)
        << "also of a process that the spare has forked";
    EXPECT_EQ(testing::text_of(tree.manager.restart(0, watchdog(), nullptr)),
              "ready 0 generation " + std::to_string(round));
    EXPECT_EQ(tree.manager.report(0).generation, static_cast<std::uint64_t>(round));
    EXPECT_EQ(tree.call(0, Order::kPid), std::to_string(tree.manager.report(0).pid));
  }
  EXPECT_EQ(tree.call(1, Order::kPid), std::to_string(tree.manager.report(1).pid));
}

TEST(WorkerManagerRestart, ARestartWhoseStartFailsLeavesTheChildDeadAndCanBeTriedAgain) {
  ForkedTree tree(1);
  tree.on_start = [](const ChildContext& context, ReplyWriter& reply) {
    if (context.generation == 1)
      reply.write(ReplyStatus::kFailure, encode_failure({"OSError", "busy", "", false}));
  };
  tree.start();
  tree.manager.kill(0);
  try {
    tree.manager.restart(0, watchdog(), nullptr);
    FAIL() << "restarted";
  } catch (const CallError& error) {
    EXPECT_EQ(error.failure.message, "busy");
  }
  EXPECT_EQ(tree.manager.report(0).state, ChildState::kDead);
  EXPECT_THROW(tree.call(0, Order::kPid), CallError);
  tree.manager.restart(0, watchdog(), nullptr);
  EXPECT_EQ(tree.call(0, Order::kPid), std::to_string(tree.manager.report(0).pid));
}

TEST(WorkerManagerRestart, WithoutItsSpareATreeGoesOnAndRestartSaysWhyItCannot) {
  ForkedTree tree(2);
  tree.start();
  kill(tree.manager.report_spare().pid, SIGKILL);
  ASSERT_TRUE(wait_until([&] { return tree.manager.report_spare().state == ChildState::kDead; }));
  EXPECT_NE(tree.manager.report_spare().first_cause.find("killed by SIGKILL"), std::string::npos);
  EXPECT_EQ(tree.call(1, Order::kPid), std::to_string(tree.manager.report(1).pid));
  tree.manager.kill(0);
  for (int attempt = 0; attempt < 2; ++attempt) {
    try {
      tree.manager.restart(0, watchdog(), nullptr);
      FAIL() << "restarted";
    } catch (const CallError& error) {
      EXPECT_EQ(error.kind, CallError::Kind::kStartup);
      EXPECT_NE(error.message.find("spare"), std::string::npos) << error.message;
    }
  }
}

TEST(WorkerManagerRestart, AForkThatComesAfterItsTimeOutAnswersNoLaterRestart) {
  ForkedTree tree(2);
  tree.start();
  tree.manager.kill(0);
  tree.manager.kill(1);
  const pid_t spare = tree.manager.report_spare().pid;
  kill(spare, SIGSTOP);
  EXPECT_THROW(tree.manager.restart(0, Deadline::after_seconds(0.05), nullptr), CallError);
  EXPECT_THROW(tree.manager.restart(1, Deadline::after_seconds(0.05), nullptr), CallError);
  kill(spare, SIGCONT);
  EXPECT_EQ(testing::text_of(tree.manager.restart(1, watchdog(), nullptr)), "ready 1 generation 1");
  EXPECT_EQ(testing::text_of(tree.manager.restart(0, watchdog(), nullptr)), "ready 0 generation 2");
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(tree.call(i, Order::kPid), std::to_string(tree.manager.report(i).pid));
  }
}

TEST(WorkerManagerRestart, LC2_AStopEndsARestartThatHangs) {
  ForkedTree tree(1);
  tree.on_start = [](const ChildContext& context, ReplyWriter&) {
    if (context.generation == 1) testing::stay_for_ever();
  };
  tree.start();
  tree.manager.kill(0);
  std::thread restarter(
      [&] { EXPECT_THROW(tree.manager.restart(0, Deadline::never(), nullptr), CallError); });
  ASSERT_TRUE(wait_until([&] { return tree.manager.report(0).state == ChildState::kStarting; }));
  const Deadline budget = Deadline::after_seconds(testing::scaled(kShutdownBudgetS));
  tree.manager.stop(budget);
  EXPECT_FALSE(budget.passed());
  restarter.join();
  EXPECT_TRUE(no_child_is_left());
}

TEST(WorkerManagerRestart, LC2_AStopEndsARestartThatWaitsForAStuckSpare) {
  ForkedTree tree(1);
  tree.start();
  tree.manager.kill(0);
  kill(tree.manager.report_spare().pid, SIGSTOP);
  std::thread restarter(
      [&] { EXPECT_THROW(tree.manager.restart(0, Deadline::never(), nullptr), CallError); });
  ASSERT_TRUE(wait_until([&] { return tree.manager.report(0).generation == 1; }));
  tree.manager.stop(Deadline::after_seconds(kShutdownBudgetS));
  restarter.join();
  EXPECT_TRUE(no_child_is_left());
}

}  // namespace
}  // namespace simpler
