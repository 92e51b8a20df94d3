// What a child's loop does with its threads: who runs what, in which order, beside what.
#include "hierarchical/workers/child_loop.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <thread>
#include <vector>

#include "hierarchical/ipc/control_protocol.h"
#include "in_process_child.h"

namespace simpler {
namespace {

using testing::Gate;
using testing::Handlers;
using testing::InProcessChild;
using testing::make_child;
using testing::wait_until;
using testing::watchdog;

class ChildLoopTest : public ::testing::Test {
 protected:
  InProcessChild& world = make_child();
  Gate begun;
  Gate may_end;

  ~ChildLoopTest() override { world.main.stop(); }

  int post_op(ControlOp op) {
    ControlRequest request = InProcessChild::request(Lane::kTransfer);
    request.op = op;
    return world.post(request);
  }
  int post(Lane lane, std::string_view payload = {}) {
    return world.post(InProcessChild::request(lane, payload));
  }
  // A task that keeps the main thread until may_end is open.
  std::uint64_t occupy_main_thread() {
    world.handlers.on_task = [this](std::uint32_t, std::span<const std::byte>, ReplyWriter&) {
      begun.open();
      may_end.wait();
    };
    const std::uint64_t seq = world.publish();
    begun.wait();
    return seq;
  }
};

TEST_F(ChildLoopTest, CP10_ExclusiveHandlersAndTasksRunOnOneThreadAlwaysTheSame) {
  std::set<std::thread::id> threads;
  std::atomic<int> at_once{0};
  int most_at_once = 0;
  const auto note = [&] {
    most_at_once = std::max(most_at_once, at_once.fetch_add(1) + 1);
    threads.insert(std::this_thread::get_id());
    at_once.fetch_sub(1);
  };
  world.handlers.on_control = [&](const ChildRequest&, ReplyWriter&) { note(); };
  world.handlers.on_task = [&](std::uint32_t, std::span<const std::byte>, ReplyWriter&) { note(); };
  world.main.start();
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i) {
    callers.emplace_back([&, i] {
      for (int round = 0; round < 100; ++round) {
        if (i % 2 == 0) {
          world.call(Lane::kMain);
        } else {
          world.outcome(world.publish());
        }
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(threads.size(), 1U);
  EXPECT_EQ(most_at_once, 1);
}

TEST_F(ChildLoopTest, CP10_HandlersAndTasksTakeTurnsSoThatNeitherStarves) {
  std::string order;
  world.handlers.on_control = [&](const ChildRequest&, ReplyWriter&) { order += 'h'; };
  world.handlers.on_task = [&](std::uint32_t, std::span<const std::byte>, ReplyWriter&) {
    order += 't';
  };
  std::vector<int> slots;
  std::uint64_t last = 0;
  for (int i = 0; i < 4; ++i) slots.push_back(post(Lane::kMain));
  for (int i = 0; i < 6; ++i) last = world.publish();
  world.main.start();
  for (const int slot : slots) world.finish(slot);
  world.outcome(last);
  EXPECT_EQ(order, "hthththttt");
}

TEST_F(ChildLoopTest, ExclusiveHandlersRunInTheOrderTheyWerePosted) {
  std::string order;
  world.handlers.on_control = [&](const ChildRequest& request, ReplyWriter&) {
    order += testing::text_of(request.payload);
  };
  const int early = post(Lane::kMain, "-");  // gives slot 0 back, for the last request
  ASSERT_TRUE(world.child.control.poll_withdraw(early));
  std::vector<int> slots;
  for (const char* name : {"a", "b", "c"}) slots.push_back(post(Lane::kMain, name));
  ASSERT_TRUE(world.child.control.poll_withdraw(slots[0]));
  slots[0] = post(Lane::kMain, "d");
  world.main.start();
  for (const int slot : slots) world.finish(slot);
  EXPECT_EQ(order, "bcd");
}

TEST_F(ChildLoopTest, CP10_FourConcurrentHandlersRunAtOnceAndNoMore) {
  std::atomic<int> running{0};
  std::atomic<int> most{0};
  world.handlers.on_control = [&](const ChildRequest&, ReplyWriter&) {
    const int now = running.fetch_add(1) + 1;
    for (int seen = most.load(); seen < now && !most.compare_exchange_weak(seen, now);) {
    }
    may_end.wait();
    running.fetch_sub(1);
  };
  world.main.start();
  std::vector<int> slots;
  for (int i = 0; i < 12; ++i) slots.push_back(post(Lane::kService));
  ASSERT_TRUE(wait_until([&] { return running.load() == ChildLoop::kConcurrentHandlers; }));
  EXPECT_EQ(world.call_builtin(ControlOp::PING), "") << "the main thread still answers";
  EXPECT_EQ(running.load(), ChildLoop::kConcurrentHandlers);
  may_end.open();
  for (const int slot : slots) world.finish(slot);
  EXPECT_EQ(most.load(), ChildLoop::kConcurrentHandlers);
}

TEST_F(ChildLoopTest, CP10_TransfersWaitForNoHandlerAndHandlersForNoTransfer) {
  std::atomic<int> transfers{0};
  std::atomic<int> handlers{0};
  world.handlers.on_control = [&](const ChildRequest& request, ReplyWriter&) {
    if (request.op == ControlOp::TRANSFER_CONTROL) return;
    ++(request.op == ControlOp::TRANSFER ? transfers : handlers);
    may_end.wait();
  };
  world.main.start();
  std::vector<int> slots;
  for (int i = 0; i < 6; ++i) slots.push_back(post(Lane::kService));
  ASSERT_TRUE(wait_until([&] { return handlers.load() == ChildLoop::kConcurrentHandlers; }));
  for (int i = 0; i < 8; ++i) slots.push_back(post_op(ControlOp::TRANSFER));
  ASSERT_TRUE(wait_until([&] { return transfers.load() == 8; }));
  world.finish(post_op(ControlOp::TRANSFER_CONTROL));
  EXPECT_EQ(handlers.load(), ChildLoop::kConcurrentHandlers);
  may_end.open();
  for (const int slot : slots) world.finish(slot);
  EXPECT_EQ(handlers.load(), 6);
}

TEST_F(ChildLoopTest, CP10_ConcurrentHandlersRunBesideAStuckKernel) {
  world.main.start();
  const std::uint64_t stuck = occupy_main_thread();
  for (int i = 0; i < 20; ++i) EXPECT_EQ(world.call(Lane::kService, "beside"), "beside");
  const int exclusive = post(Lane::kMain, "after");
  EXPECT_EQ(world.child.control.wait_reply(exclusive, Deadline::at(0), nullptr),
            CallWait::kTimedOut);
  may_end.open();
  world.outcome(stuck);
}

TEST_F(ChildLoopTest, PingAndEchoAreAnsweredWhileTheMainThreadIsBusy) {
  world.main.start();
  const std::uint64_t stuck = occupy_main_thread();
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(world.call_builtin(ControlOp::PING), "");
    EXPECT_EQ(world.call_builtin(ControlOp::ECHO, "hello"), "hello");
  }
  may_end.open();
  world.outcome(stuck);
}

TEST_F(ChildLoopTest, PingIsAnsweredHoweverTheMainThreadBecomesBusyMeanwhile) {
  std::atomic<bool> done{false};
  world.main.start();
  std::thread worker([&] {
    while (!done.load()) world.outcome(world.publish());
  });
  for (int i = 0; i < 2000; ++i) world.call_builtin(ControlOp::PING);
  done.store(true);
  worker.join();
}

TEST_F(ChildLoopTest, AHandlerThatWritesNothingAnswersNothing) {
  world.handlers.on_control = [](const ChildRequest&, ReplyWriter&) {};
  world.main.start();
  EXPECT_EQ(world.call(Lane::kMain, "a payload that must not come back"), "");
}

TEST_F(ChildLoopTest, CP9_AReplyThatCanNeverFitIsSaidToBeTooLarge) {
  world.handlers.on_control = [&](const ChildRequest&, ReplyWriter& reply) {
    EXPECT_EQ(reply.reserve(ReplyStatus::kOk, world.memory.space(0).reply_bytes + 1), nullptr);
  };
  world.main.start();
  try {
    world.call(Lane::kMain);
    FAIL() << "no error";
  } catch (const CallError& error) {
    EXPECT_EQ(error.failure.type_name, "ValueError");
  }
}

TEST_F(ChildLoopTest, CP9_AReplyThatFindsNoSpaceByTheDeadlineSaysSo) {
  const std::size_t half = world.memory.space(0).reply_bytes;
  world.handlers.on_control = [&](const ChildRequest&, ReplyWriter& reply) {
    reply.reserve(ReplyStatus::kOk, half);
  };
  world.main.start();
  const int unread = post(Lane::kMain);
  ASSERT_TRUE(wait_until([&] { return !world.child.control.reply_due(unread); }));
  const int starved = world.post(InProcessChild::request(Lane::kMain, "", Deadline::at(1)));
  EXPECT_EQ(world.child.control.wait_reply(starved, watchdog(), nullptr), CallWait::kOk);
  try {
    take_reply(world.child, starved);
    ADD_FAILURE() << "no error";
  } catch (const CallError& error) {
    EXPECT_EQ(error.kind, CallError::Kind::kBackPressure);
  }
  const int waiting = post(Lane::kMain);
  EXPECT_EQ(world.finish(unread).size(), half);
  EXPECT_EQ(world.finish(waiting).size(), half);
}

TEST_F(ChildLoopTest, LC1_AChildThatCannotServeAnswersStartWithItsOwnError) {
  ControlRequest start;
  start.op = ControlOp::START;
  world.child.control.fill(kLifecycleSlot, start, nullptr);
  world.child.control.post(kLifecycleSlot, 1);
  const RemoteFailure failure{"ImportError", "no driver", "trace", false};
  world.main.loop().fail_start(encode_failure(failure));
  ASSERT_EQ(world.child.control.wait_reply(kLifecycleSlot, watchdog(), nullptr), CallWait::kOk);
  const ReplyView reply = world.child.control.read_reply(kLifecycleSlot);
  EXPECT_EQ(reply.status, ReplyStatus::kFailure);
  EXPECT_EQ(decode_failure(reply.bytes), failure);
  world.child.control.release(kLifecycleSlot);
  world.main.start();
}

TEST_F(ChildLoopTest, CP11_ATreeThatMayNotSpinStillAnswers) {
  world.memory.header().spin_limit = 0;
  world.main.start();
  for (int i = 0; i < 50; ++i) EXPECT_EQ(world.call(Lane::kMain, "x"), "x");
  EXPECT_EQ(world.memory.header().spinners.load(), 0U);
}

}  // namespace
}  // namespace simpler
