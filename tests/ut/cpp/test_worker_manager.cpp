// The manager with real processes whose handlers are C++.
#include "hierarchical/workers/worker_manager.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <limits>
#include <thread>

#include "forked_tree.h"
#include "hierarchical/base/error.h"
#include "hierarchical/os/messages.h"

namespace simpler {
namespace {

using testing::ForkedTree;
using testing::kShutdownBudgetS;
using testing::no_child_is_left;
using testing::Order;
using testing::wait_until;
using testing::watchdog;

int lowest_free_descriptor() {
  const int fd = dup(0);
  close(fd);
  return fd;
}

TEST(WorkerManager, LC1_StartReturnsEveryAnswerInWorkerOrderAndStopLeavesNothing) {
  const int descriptors = lowest_free_descriptor();
  {
    ForkedTree tree(3);
    const auto answers = tree.start();
    ASSERT_EQ(answers.size(), 3U);
    for (int i = 0; i < 3; ++i) {
      EXPECT_EQ(testing::text_of(answers[static_cast<std::size_t>(i)]),
                "ready " + std::to_string(i) + " generation 0");
      EXPECT_EQ(tree.manager.report(i).state, ChildState::kReady);
      EXPECT_EQ(tree.call(i, Order::kPid), std::to_string(tree.manager.report(i).pid));
    }
    EXPECT_EQ(tree.manager.report_spare().state, ChildState::kReady);
    tree.manager.stop(watchdog());
    for (int i = 0; i < 3; ++i) EXPECT_EQ(tree.manager.report(i).state, ChildState::kClosed);
    EXPECT_TRUE(no_child_is_left());
    EXPECT_TRUE(tree.deaths().empty());
    tree.manager.stop(watchdog());
  }
  EXPECT_EQ(lowest_free_descriptor(), descriptors);
}

TEST(WorkerManager, LC1_TheFirstChildsErrorIsRaisedWhileAnotherHangs) {
  ForkedTree tree(2);
  tree.on_start = [](const ChildContext& context, ReplyWriter& reply) {
    if (context.child.index == 0) testing::stay_for_ever();
    reply.write(ReplyStatus::kFailure, encode_failure({"OSError", "no device", "", false}));
  };
  try {
    tree.start();
    FAIL() << "started";
  } catch (const CallError& error) {
    EXPECT_EQ(error.kind, CallError::Kind::kRemote);
    EXPECT_EQ(error.worker, 1);
    EXPECT_EQ(error.failure.message, "no device");
  }
  EXPECT_TRUE(no_child_is_left());
}

TEST(WorkerManager, LC1_AChildThatDiesInStartIsReportedWithItsExit) {
  ForkedTree tree(2);
  tree.on_start = [](const ChildContext& context, ReplyWriter&) {
    if (context.child.index == 1) _exit(9);
    testing::stay_for_ever();
  };
  try {
    tree.start();
    FAIL() << "started";
  } catch (const CallError& error) {
    EXPECT_EQ(error.kind, CallError::Kind::kDied);
    EXPECT_NE(error.message.find("exited with code 9"), std::string::npos) << error.message;
  }
  EXPECT_TRUE(no_child_is_left());
}

TEST(WorkerManager, LC1_AStartThatTakesTooLongEndsAtItsDeadline) {
  ForkedTree tree(1);
  tree.on_start = [](const ChildContext&, ReplyWriter&) { testing::stay_for_ever(); };
  try {
    tree.start(Deadline::after_seconds(0.1));
    FAIL() << "started";
  } catch (const CallError& error) {
    EXPECT_EQ(error.kind, CallError::Kind::kTimedOut);
  }
  EXPECT_TRUE(no_child_is_left());
}

TEST(WorkerManager, LC1_AForkThatFailsHalfWayLeavesNothing) {
  for (const int failing : {1, 2, 3, 4}) {  // the fourth is the spare
    const int descriptors = lowest_free_descriptor();
    {
      ForkedTree tree(3);
      int forks = 0;
      tree.hooks.before = [&] {
        if (++forks == failing) throw Error(ErrorCode::kSystem, "fork: no more processes");
      };
      EXPECT_THROW(tree.start(), Error);
      EXPECT_TRUE(no_child_is_left());
    }
    EXPECT_EQ(lowest_free_descriptor(), descriptors);
  }
}

TEST(WorkerManager, LC1_AChildThatCannotBeWatchedDoesNotStay) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "UBSan opens a pipe to look at an exception's type, and here there are no "
                  "descriptors left";
#endif
  rlimit before{};
  getrlimit(RLIMIT_NOFILE, &before);
  ForkedTree tree(1);
  tree.hooks.after_in_parent = [&] {  // no number is left for the pidfd
    const rlimit none{static_cast<rlim_t>(lowest_free_descriptor()), before.rlim_max};
    setrlimit(RLIMIT_NOFILE, &none);
  };
  EXPECT_THROW(tree.start(), Error);
  setrlimit(RLIMIT_NOFILE, &before);
  EXPECT_TRUE(no_child_is_left());
}

TEST(WorkerManager, CP3_EachWayToDieHasItsOwnTrueDescription) {
  const std::pair<Order, const char*> ways[] = {
      {Order::kExit, "exited with code 3"},
      {Order::kAbort, "killed by SIGABRT (aborted)"},
      {Order::kSegfault, "killed by SIGSEGV (segmentation fault)"},
      {Order::kKillItself, "killed by SIGKILL"}};
  ForkedTree tree(5);
  tree.start();
  int worker = 0;
  for (const auto& [way, description] : ways) {
    std::string message;
    try {
      tree.call(worker, way);
      FAIL() << "answered";
    } catch (const CallError& error) {
      EXPECT_EQ(error.kind, CallError::Kind::kDied);
      message = error.message;
    }
    EXPECT_NE(message.find(description), std::string::npos) << message;
    EXPECT_NE(message.find("chip " + std::to_string(worker) + " (device"), std::string::npos);
    EXPECT_NE(message.find("running request " + std::to_string(static_cast<int>(way))),
              std::string::npos)
        << message;
    EXPECT_THROW(tree.call(worker, Order::kPid), CallError);
    EXPECT_EQ(tree.manager.gone_error(worker).message, message) << "CP-4: the first cause stays";
    EXPECT_EQ(tree.manager.report(worker).state, ChildState::kDead);
    ++worker;
  }
  ASSERT_TRUE(wait_until([&] { return tree.deaths().size() == 4; }));
  EXPECT_EQ(tree.call(4, Order::kPid), std::to_string(tree.manager.report(4).pid));
}

TEST(WorkerManager, CP3_ADeathWhileATaskRunsNamesTheTask) {
  ForkedTree tree(1);
  tree.start();
  simpler::ChildProcess& child = tree.manager.child(0);
  std::uint64_t seq = 0;
  ASSERT_EQ(child.ring.publish(42, {}, 0, watchdog(), nullptr, seq), TaskWait::kOk);
  ASSERT_TRUE(wait_until([&] { return child.ring.running().has_value(); }));
  tree.manager.kill(0);
  TaskOutcome out;
  EXPECT_EQ(child.ring.wait(seq, watchdog(), nullptr, out), TaskWait::kPeerGone);
  const std::string cause = tree.manager.gone_error(0).message;
  EXPECT_NE(cause.find("killed by SIGKILL"), std::string::npos) << cause;
  EXPECT_NE(cause.find("running task 1 task 42"), std::string::npos) << cause;
}

TEST(WorkerManager, AHostileStartTimeDoesNotConfuseTheDescription) {
  ForkedTree tree(1);
  tree.start();
  simpler::ChildProcess& child = tree.manager.child(0);
  const int slot = tree.post(0, Order::kStay);
  ASSERT_TRUE(wait_until([&] { return !tree.manager.describe_activity(child).empty(); }));
  for (const std::int64_t started :
       {std::numeric_limits<std::int64_t>::min(), std::numeric_limits<std::int64_t>::max()}) {
    child.block.slots[slot].started_ns.store(started);
    EXPECT_NE(tree.manager.describe_activity(child).find("0.000 s"), std::string::npos);
  }
}

TEST(WorkerManager, CP3_AStatusTakenByAnotherWaiterIsStillADeath) {
  ForkedTree tree(1);
  tree.start();
  signal(SIGCHLD, SIG_IGN);
  EXPECT_THROW(tree.call(0, Order::kExit), CallError);
  signal(SIGCHLD, SIG_DFL);
  const std::string cause = tree.manager.gone_error(0).message;
  EXPECT_TRUE(cause.find("taken by another waiter") != std::string::npos ||
              cause.find("exited with code 3") != std::string::npos)  // said before it was taken
      << cause;
}

TEST(WorkerManager, LC2_AStuckChildIsKilledWithinTheBudget) {
  for (const Order order : {Order::kStay, Order::kStayAndIgnoreSigterm}) {
    ForkedTree tree(2);
    tree.start();
    const int slot = tree.post(0, order);
    ASSERT_TRUE(
        wait_until([&] { return !tree.manager.describe_activity(tree.manager.child(0)).empty(); }));
    std::thread caller([&] {
      EXPECT_EQ(tree.manager.child(0).control.wait_reply(slot, Deadline::never(), nullptr),
                CallWait::kPeerGone);
    });
    const Deadline budget = Deadline::after_seconds(testing::scaled(kShutdownBudgetS));
    tree.manager.stop(budget);
    EXPECT_FALSE(budget.passed());
    caller.join();
    EXPECT_TRUE(no_child_is_left());
  }
}

TEST(WorkerManager, LC2_ManyThreadsMayStopAtOnceWithCallsInFlight) {
  ForkedTree tree(2);
  tree.start();
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      try {
        for (;;) tree.call(i % 2, Order::kPid);
      } catch (const CallError& error) {
        EXPECT_EQ(error.kind, CallError::Kind::kClosed) << error.message;
      }
    });
  }
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      tree.manager.stop(watchdog());
      EXPECT_EQ(tree.manager.report(0).state, ChildState::kClosed);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(no_child_is_left());
}

TEST(WorkerManager, LC1_OnceStartReturnsNoChildHoldsWhatItInherited) {
  for (int round = 0; round < 10; ++round) {
    auto [ours, theirs] = make_socket_pair();
    ForkedTree tree(1);
    tree.hooks.after_in_child = [] {  // letting go comes after it
      for (int i = 0; i < 1000; ++i) std::this_thread::yield();
    };
    tree.start();
    theirs.reset();
    std::byte byte{};
    EXPECT_FALSE(poll_receive(ours.get(), {&byte, 1})) << "somebody still holds the other end";
  }
}

TEST(WorkerManager, LogFramesArriveWholeAndInOrder) {
  ForkedTree tree(1);
  tree.start();
  tree.call(0, Order::kLog);
  ASSERT_TRUE(wait_until([&] { return tree.frames().size() == 3; }));
  EXPECT_EQ(tree.frames(), (std::vector<std::string>{"", "short", std::string(300'000, 'l')}));
}

TEST(WorkerManager, AChildThatScribblesOnItsLogIsStillWatched) {
  ForkedTree tree(1);
  tree.start();
  tree.call(0, Order::kScribbleOnLog);
  EXPECT_THROW(tree.call(0, Order::kExit), CallError);
  EXPECT_TRUE(tree.frames().empty());
}

TEST(WorkerManager, CP6_AChildThatNeverStopsLoggingHidesNoOthersDeath) {
  ForkedTree tree(2);
  tree.start();
  tree.post(0, Order::kLogForEver);
  ASSERT_TRUE(wait_until([&] { return tree.frames().size() > 100; }));
  tree.manager.kill(1);
  EXPECT_EQ(tree.manager.report(1).state, ChildState::kDead);
}

TEST(WorkerManager, LC3_NothingOutlivesAParentThatIsKilled) {
  // The children's pids come over shared memory, and the test watches them by pidfd.
  SharedRegion pids(4096, "pids", SharedRegion::Pages::kCommitted);
  auto* published = reinterpret_cast<std::atomic<int>*>(pids.data());
  testing::ChildProcess parent([&] {
    ForkedTree tree(2);
    tree.start();
    tree.post(0, Order::kStay);
    for (int i = 0; i < 2; ++i) published[i].store(tree.manager.report(i).pid);
    published[2].store(tree.manager.report_spare().pid);
    testing::stay_for_ever();
    return 0;
  });
  ASSERT_TRUE(wait_until([&] { return published[2].load() != 0; }));
  std::vector<Descriptor> left;
  for (int i = 0; i < 3; ++i) left.push_back(open_pidfd(published[i].load()).value());
  send_signal(left[1].get(), SIGSTOP);  // it cannot act by itself: the spare does
  send_signal(parent.pidfd(), SIGKILL);
  const Deadline promised = Deadline::after_seconds(testing::scaled(1.0));
  for (const Descriptor& pidfd : left) EXPECT_TRUE(wait_process_end(pidfd.get(), promised));
}

}  // namespace
}  // namespace simpler
