// One request to every chip (CP-7), over chips that are threads of this process.
#include <gtest/gtest.h>

#include <algorithm>
#include <thread>

#include "in_process_tree.h"

namespace simpler {
namespace {

using testing::Dispatcher;
using testing::FakeInterrupt;
using testing::Gate;
using testing::InProcessChild;
using testing::InProcessTree;
using testing::text_of;
using testing::wait_until;
using testing::watchdog;

using Metas = std::vector<std::span<const std::byte>>;

class BroadcastTest : public ::testing::Test {
 protected:
  static constexpr int kChips = 3;
  InProcessTree& world = testing::make_immortal<InProcessTree>(kChips);
  Dispatcher dispatcher{world.tree.async()};
  Gate begun;
  Gate may_end;

  ~BroadcastTest() override {
    may_end.open();
    world.stop();
  }

  std::vector<BroadcastReply> broadcast(const ControlRequest& request, bool fail_fast = false,
                                        const Metas& metas = {}, Interrupt* interrupt = nullptr) {
    return world.tree.broadcast(request, metas, fail_fast, interrupt);
  }
  void make_fail(int chip) {
    world.handlers[static_cast<std::size_t>(chip)]->on_control = [](const ChildRequest&,
                                                                    ReplyWriter& reply) {
      reply.write(ReplyStatus::kFailure, encode_failure({"OSError", "broken", "", false}));
    };
  }
  void make_stuck(int chip) {
    world.handlers[static_cast<std::size_t>(chip)]->on_control = [this](const ChildRequest&,
                                                                        ReplyWriter&) {
      begun.open();
      may_end.wait();
    };
  }
};

TEST_F(BroadcastTest, RepliesComeInWorkerOrderEachToItsOwnMeta) {
  for (const auto& handlers : world.handlers) {
    handlers->on_control = [](const ChildRequest& request, ReplyWriter& reply) {
      const std::string both = text_of(request.meta) + text_of(request.payload);
      reply.write(ReplyStatus::kOk, testing::bytes_of(both));
    };
  }
  world.start();
  const Metas metas{testing::bytes_of("a"), testing::bytes_of("b"), testing::bytes_of("c")};
  for (const std::string& payload : {std::string("!"), std::string(20'000, '!')}) {
    const auto replies = broadcast(InProcessChild::request(Lane::kMain, payload), false, metas);
    ASSERT_EQ(replies.size(), 3U);
    EXPECT_EQ(text_of(replies[0].bytes), "a" + payload);
    EXPECT_EQ(text_of(replies[1].bytes), "b" + payload);
    EXPECT_EQ(text_of(replies[2].bytes), "c" + payload);
  }
}

TEST_F(BroadcastTest, CP9_ALargeRequestIsStagedOnceForAll) {
  world.start();
  const std::string payload(100'000, 'x');
  for (const BroadcastReply& reply : broadcast(InProcessChild::request(Lane::kMain, payload))) {
    EXPECT_EQ(text_of(reply.bytes), payload);
  }
  EXPECT_TRUE(world.child(0).arena.wants_trim());
  EXPECT_FALSE(world.child(1).arena.wants_trim());
  EXPECT_FALSE(world.child(2).arena.wants_trim());
}

TEST_F(BroadcastTest, CP9_APayloadAboveTheLimitIsRefusedBeforeAnythingIsSent) {
  world.start();
  const std::string payload(InProcessTree::options(1).max_payload + 1, 'x');
  for (const bool fail_fast : {false, true}) {
    EXPECT_THROW(broadcast(InProcessChild::request(Lane::kMain, payload), fail_fast), Error);
  }
  for (int i = 0; i < kChips; ++i) EXPECT_EQ(world.child(i).control.counters().calls.load(), 0U);
}

TEST_F(BroadcastTest, CP7_AFailingAStuckAndADeadChipEachHaveTheirOwnError) {
  make_fail(0);
  make_stuck(1);
  world.start();
  world.child(2).control.fail_all(false);
  const auto replies =
      broadcast(InProcessChild::request(Lane::kMain, "", Deadline::after_seconds(0.05)));
  EXPECT_EQ(replies[0].error->kind, CallError::Kind::kRemote);
  EXPECT_EQ(replies[1].error->kind, CallError::Kind::kTimedOut);
  EXPECT_NE(replies[2].error, nullptr);
  may_end.open();
}

TEST_F(BroadcastTest, CP7_ItStartsOnAllChipsBeforeItWaitsForAny) {
  std::atomic<int> running{0};
  for (const auto& handlers : world.handlers) {
    handlers->on_control = [&](const ChildRequest&, ReplyWriter&) {
      running.fetch_add(1);
      EXPECT_TRUE(wait_until([&] { return running.load() == kChips; }));
    };
  }
  world.start();
  for (const BroadcastReply& reply : broadcast(InProcessChild::request(Lane::kMain))) {
    EXPECT_EQ(reply.kind, BroadcastReply::Kind::kReply);
  }
}

TEST_F(BroadcastTest, CP7_EveryChipSeesAllBroadcastsInTheSameOrder) {
  std::array<std::vector<std::string>, kChips> seen;
  for (std::size_t i = 0; i < kChips; ++i) {
    world.handlers[i]->on_control = [&, i](const ChildRequest& request, ReplyWriter&) {
      seen[i].push_back(text_of(request.payload));
    };
  }
  world.start();
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      for (int round = 0; round < 50; ++round) {
        const std::string name = std::to_string(thread) + ":" + std::to_string(round);
        const ControlRequest request = InProcessChild::request(Lane::kMain, name);
        if (thread == 3) {
          world.tree.async().submit_broadcast(request, {});
        } else {
          broadcast(request, thread == 2);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  ASSERT_TRUE(dispatcher.wait_for(AsyncEvent::Kind::kReply, std::size_t{50} * kChips));
  EXPECT_EQ(seen[0].size(), 200U);
  EXPECT_EQ(seen[0], seen[1]);
  EXPECT_EQ(seen[0], seen[2]);
}

TEST_F(BroadcastTest, CP7_FailFastReturnsAtTheFirstErrorAndDropsLaterReplies) {
  make_stuck(0);
  make_fail(2);
  world.start();
  const auto replies =
      broadcast(InProcessChild::request(Lane::kMain, "", watchdog(), 5), /*fail_fast=*/true);
  EXPECT_EQ(replies[0].kind, BroadcastReply::Kind::kPending);
  ASSERT_EQ(replies[2].kind, BroadcastReply::Kind::kError);
  EXPECT_EQ(replies[2].error->failure.type_name, "OSError");
  may_end.open();
  EXPECT_TRUE(
      wait_until([&] { return world.child(0).control.counters().late_replies.load() == 1; }));
  EXPECT_TRUE(dispatcher.wait_for(AsyncEvent::Kind::kEnded, 1)) << "its hold ends with it";
}

TEST_F(BroadcastTest, CP7_FailFastWithoutAnErrorGivesEveryReply) {
  world.start();
  for (int round = 0; round < 20; ++round) {
    for (const BroadcastReply& reply :
         broadcast(InProcessChild::request(Lane::kMain, "x"), /*fail_fast=*/true)) {
      EXPECT_EQ(text_of(reply.bytes), "x");
    }
  }
}

TEST_F(BroadcastTest, LC4_AnInterruptedBroadcastEndsTheHoldOnEveryChipOnce) {
  for (const bool fail_fast : {false, true}) {
    InProcessTree& own = testing::make_immortal<InProcessTree>(2);
    Gate own_begun;
    Gate own_may_end;
    own.handlers[0]->on_control = [&](const ChildRequest&, ReplyWriter&) {
      own_begun.open();
      own_may_end.wait();
    };
    own.start();
    Dispatcher events(own.tree.async());
    FakeInterrupt interrupt;
    std::thread signaller([&] {
      own_begun.wait();
      interrupt.interrupt();
    });
    try {
      own.tree.broadcast(InProcessChild::request(Lane::kMain, "", watchdog(), 9), {}, fail_fast,
                         &interrupt);
      ADD_FAILURE() << "not interrupted";
    } catch (const CallError& error) {
      EXPECT_EQ(error.kind, CallError::Kind::kInterrupted);
    }
    signaller.join();
    own_may_end.open();
    EXPECT_TRUE(events.wait_for(AsyncEvent::Kind::kEnded, 2));
    own.stop();
    events.finish();
    EXPECT_EQ(events.numbers(AsyncEvent::Kind::kEnded), (std::vector<std::uint64_t>{9, 9}));
  }
  world.start();
}

TEST_F(BroadcastTest, CP2_ABroadcastWaitsForSlotsWithinItsDeadline) {
  make_stuck(1);
  world.start();
  std::vector<int> slots;
  ControlParentEnd& control = world.child(1).control;
  for (int slot = control.poll_slot(); slot >= 0; slot = control.poll_slot()) slots.push_back(slot);
  const auto replies =
      broadcast(InProcessChild::request(Lane::kMain, "x", Deadline::after_seconds(0.02)));
  EXPECT_EQ(replies[1].error->kind, CallError::Kind::kTimedOut);
  EXPECT_FALSE(replies[1].error->started);
  for (const int slot : slots) control.release(slot);
}

}  // namespace
}  // namespace simpler
