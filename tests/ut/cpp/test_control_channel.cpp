// One child's control slots, from both ends: the real parent's end and the real loop.
#include <gtest/gtest.h>

#include <random>
#include <thread>
#include <vector>

#include "hierarchical/base/error.h"
#include "in_process_child.h"

namespace simpler {
namespace {

using testing::FakeInterrupt;
using testing::Gate;
using testing::InProcessChild;
using testing::make_child;
using testing::wait_until;
using testing::watchdog;

const Deadline kNow = Deadline::at(0);

class ControlChannel : public ::testing::Test {
 protected:
  InProcessChild& world = make_child();
  ControlParentEnd& control = world.child.control;
  ControlCounters& counters = control.counters();
  Gate begun;
  Gate may_end;

  ControlChannel() { world.main.start(); }
  ~ControlChannel() override { world.main.stop(); }

  // From here each handler says that it has begun and ends when it may.
  void hold_handlers() {
    world.handlers.on_control = [this](const ChildRequest& request, ReplyWriter& reply) {
      begun.open();
      may_end.wait();
      reply.write(ReplyStatus::kOk, request.payload);
    };
  }
  std::vector<std::uint64_t> reclaim() {
    std::vector<std::uint64_t> holds;
    control.reclaim_abandoned([&](std::uint64_t hold) { holds.push_back(hold); });
    return holds;
  }
};

TEST_F(ControlChannel, CP9_PayloadsAroundEveryBoundaryComeBackWhole) {
  for (const std::size_t nbytes :
       {std::size_t{0}, std::size_t{1}, kSlotInlineBytes - 1, kSlotInlineBytes,
        kSlotInlineBytes + 1, std::size_t{4096} * 3, std::size_t{1} << 20}) {
    std::string payload(nbytes, '\0');
    for (std::size_t i = 0; i < nbytes; ++i) payload[i] = static_cast<char>(i * 31 >> 3);
    for (const Lane lane : {Lane::kMain, Lane::kService, Lane::kTransfer}) {
      EXPECT_EQ(world.call(lane, payload), payload) << nbytes << " bytes";
    }
    EXPECT_EQ(world.call_builtin(ControlOp::ECHO, payload), payload) << nbytes << " bytes";
  }
}

TEST_F(ControlChannel, PING_AnswersNothingWhateverWasSent) {
  EXPECT_EQ(world.call_builtin(ControlOp::PING, "ignored"), "");
}

TEST_F(ControlChannel, MetaArrivesApartFromThePayload) {
  std::string meta;
  world.handlers.on_control = [&](const ChildRequest& request, ReplyWriter& reply) {
    meta = testing::text_of(request.meta);
    reply.write(ReplyStatus::kOk, request.payload);
  };
  for (const std::size_t nbytes : {std::size_t{3}, kSlotInlineBytes}) {
    ControlRequest request = InProcessChild::request(Lane::kMain);
    const std::string payload(nbytes, 'p');
    request.payload = testing::bytes_of(payload);
    request.meta = testing::bytes_of("meta");
    EXPECT_EQ(world.finish(world.post(request)), payload);
    EXPECT_EQ(meta, "meta");
  }
}

TEST_F(ControlChannel, CP5_AFailureArrivesAsItWasEncoded) {
  const RemoteFailure failure{"ValueError", "what \xff happened", "line 1\nline 2", false};
  world.handlers.on_control = [&](const ChildRequest&, ReplyWriter& reply) {
    reply.write(ReplyStatus::kFailure, encode_failure(failure));
  };
  try {
    world.call(Lane::kMain);
    FAIL() << "no error";
  } catch (const CallError& error) {
    EXPECT_EQ(error.kind, CallError::Kind::kRemote);
    EXPECT_EQ(error.failure, failure);
  }
  EXPECT_TRUE(control.all_released());
}

TEST_F(ControlChannel, CP8_ACallThatTimesOutUnbegunNeverRuns) {
  hold_handlers();
  const int busy = world.post(InProcessChild::request(Lane::kMain, "busy"));
  begun.wait();
  const int waiting = world.post(InProcessChild::request(Lane::kMain, "never"));
  EXPECT_EQ(control.wait_reply(waiting, kNow, nullptr), CallWait::kTimedOut);
  may_end.open();
  EXPECT_EQ(world.finish(busy), "busy");
  EXPECT_EQ(world.call(Lane::kMain, "next"), "next");
  EXPECT_EQ(world.handlers.replies.load(), 2);
  EXPECT_EQ(counters.timeouts.load(), 1U);
  EXPECT_EQ(counters.late_replies.load(), 0U);
}

TEST_F(ControlChannel, CP1_ALateReplyIsCountedAndItsHoldReportedOnce) {
  hold_handlers();
  const int slot = world.post(InProcessChild::request(Lane::kMain, "late", watchdog(), 41));
  begun.wait();
  EXPECT_EQ(control.wait_reply(slot, kNow, nullptr), CallWait::kTimedOutStarted);
  EXPECT_TRUE(reclaim().empty());
  EXPECT_FALSE(control.all_released());
  may_end.open();
  std::vector<std::uint64_t> holds;
  ASSERT_TRUE(wait_until([&] { return !(holds = reclaim()).empty(); }));
  EXPECT_EQ(holds, std::vector<std::uint64_t>{41});
  EXPECT_TRUE(reclaim().empty());
  EXPECT_EQ(counters.late_replies.load(), 1U);
  EXPECT_TRUE(control.all_released());
  EXPECT_EQ(world.call(Lane::kMain, "next"), "next");
}

TEST_F(ControlChannel, CP8_TheAbandonedRequestsMemoryStaysTakenWhileTheHandlerRuns) {
  hold_handlers();
  const std::size_t all = world.child.arena.capacity();
  const std::string large(all / 2 + 1, 'x');
  const int slot = world.post(InProcessChild::request(Lane::kMain, large));
  begun.wait();
  EXPECT_EQ(control.wait_reply(slot, kNow, nullptr), CallWait::kTimedOutStarted);
  std::shared_ptr<StagedBlock> block;
  EXPECT_EQ(world.child.arena.wait_stage(large.size(), kNow, nullptr, block), ArenaWait::kTimedOut);
  may_end.open();
  ASSERT_TRUE(wait_until([&] {
    reclaim();
    return control.all_released();
  }));
  EXPECT_EQ(world.child.arena.wait_stage(large.size(), kNow, nullptr, block), ArenaWait::kOk);
}

TEST_F(ControlChannel, CP8_AnInterruptedCallLeavesTheChannelUsable) {
  hold_handlers();
  FakeInterrupt interrupt;
  interrupt.interrupt();
  const int slot = world.post(InProcessChild::request(Lane::kMain, "a"));
  begun.wait();
  const int unbegun = world.post(InProcessChild::request(Lane::kMain, "b"));
  EXPECT_EQ(control.wait_reply(unbegun, Deadline::never(), &interrupt), CallWait::kInterrupted);
  EXPECT_EQ(control.wait_reply(slot, Deadline::never(), &interrupt), CallWait::kInterruptedStarted);
  may_end.open();
  EXPECT_EQ(world.call(Lane::kMain, "c"), "c");
  EXPECT_EQ(counters.timeouts.load(), 0U);
}

TEST_F(ControlChannel, CP2_WaitingForASlotEndsAtTheDeadline) {
  hold_handlers();
  std::vector<int> slots;
  for (int i = 0; i < kControlSlots - 1; ++i) {
    slots.push_back(world.post(InProcessChild::request(Lane::kMain)));
    ASSERT_GE(slots.back(), 0);
  }
  EXPECT_EQ(control.poll_slot(), -1);
  int slot = -1;
  EXPECT_EQ(control.wait_slot(kNow, nullptr, slot), CallWait::kTimedOut);
  FakeInterrupt interrupt;
  interrupt.interrupt();
  EXPECT_EQ(control.wait_slot(Deadline::never(), &interrupt, slot), CallWait::kInterrupted);
  std::thread waiter([&] { EXPECT_EQ(world.call(Lane::kMain, "queued"), "queued"); });
  may_end.open();
  for (const int held : slots) world.finish(held);
  waiter.join();
}

TEST_F(ControlChannel, CP6_ManyThreadsGetTheirOwnRepliesInAnyOrder) {
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 16; ++caller) {
    callers.emplace_back([&, caller] {
      std::mt19937 random(static_cast<unsigned>(caller));
      for (int i = 0; i < 200; ++i) {
        const std::string payload = std::to_string(caller) + ":" + std::to_string(i) +
                                    std::string(random() % 3 == 0 ? 9000 : 0, '.');
        const auto lane = static_cast<Lane>(random() % 2);
        if (world.call(lane, payload) != payload) wrong.fetch_add(1);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong.load(), 0);
  EXPECT_EQ(counters.calls.load(), 16U * 200U);
  EXPECT_TRUE(control.all_released());
}

TEST_F(ControlChannel, CP1_CallersThatGiveUpAtAnyTimeNeverGetAnothersReply) {
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&, caller] {
      std::mt19937 random(static_cast<unsigned>(caller));
      for (int i = 0; i < 300; ++i) {
        const std::string payload = std::to_string(caller) + ":" + std::to_string(i);
        const int slot =
            world.post(InProcessChild::request(static_cast<Lane>(random() % 2), payload));
        const Deadline end = Deadline::at(monotonic_now() + random() % 100'000);
        if (control.wait_reply(slot, end, nullptr) == CallWait::kOk &&
            testing::text_of(take_reply_copy(world.child, slot)) != payload) {
          wrong.fetch_add(1);
        }
        control.reclaim_abandoned([](std::uint64_t) {});
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong.load(), 0);
  EXPECT_TRUE(wait_until([&] {
    reclaim();
    return control.all_released();
  }));
}

TEST_F(ControlChannel, CP3_EveryCallThatADeadChildOwesFailsAtOnceAndSoDoLaterOnes) {
  hold_handlers();
  const int running = world.post(InProcessChild::request(Lane::kMain));
  begun.wait();
  const int posted = world.post(InProcessChild::request(Lane::kMain));
  const int abandoned = world.post(InProcessChild::request(Lane::kService, "", watchdog(), 9));
  ASSERT_TRUE(wait_until([&] {
    std::array<InFlight, kControlSlots> out;
    return control.running(out) == 2;
  }));
  EXPECT_EQ(control.wait_reply(abandoned, kNow, nullptr), CallWait::kTimedOutStarted);
  std::thread waiter([&] {
    EXPECT_EQ(control.wait_reply(running, Deadline::never(), nullptr), CallWait::kPeerGone);
  });
  control.fail_all(false);
  waiter.join();
  EXPECT_EQ(control.wait_reply(posted, Deadline::never(), nullptr), CallWait::kPeerGone);
  EXPECT_EQ(reclaim(), std::vector<std::uint64_t>{9});
  EXPECT_EQ(counters.late_replies.load(), 0U) << "a dead child's reply is not late";
  int slot = -1;
  EXPECT_EQ(control.wait_slot(Deadline::never(), nullptr, slot), CallWait::kPeerGone);
  slot = control.poll_slot();
  control.fill(slot, InProcessChild::request(Lane::kMain), nullptr);
  control.post(slot, 1000);
  EXPECT_EQ(control.wait_reply(slot, Deadline::never(), nullptr), CallWait::kPeerGone);
  EXPECT_TRUE(control.all_released());
  may_end.open();
}

TEST_F(ControlChannel, LC2_ClosingFailsCallersWhileTheChildStillRuns) {
  hold_handlers();
  const int running = world.post(InProcessChild::request(Lane::kMain, "", watchdog(), 3));
  begun.wait();
  const int posted = world.post(InProcessChild::request(Lane::kMain));
  std::thread waiter([&] {
    EXPECT_EQ(control.wait_reply(running, Deadline::never(), nullptr), CallWait::kPeerGone);
  });
  control.fail_all(true);
  waiter.join();
  EXPECT_EQ(control.wait_reply(posted, Deadline::never(), nullptr), CallWait::kPeerGone);
  EXPECT_TRUE(reclaim().empty()) << "the handler still runs";
  may_end.open();
  std::vector<std::uint64_t> holds;
  EXPECT_TRUE(wait_until([&] { return !(holds = reclaim()).empty(); }));
  EXPECT_EQ(holds, std::vector<std::uint64_t>{3});
}

TEST_F(ControlChannel, TheRunningRequestIsDescribedWithItsStart) {
  hold_handlers();
  const Nanoseconds before = monotonic_now();
  ControlRequest request = InProcessChild::request(Lane::kService);
  request.arg = 12;
  const int slot = world.post(request);
  begun.wait();
  std::array<InFlight, kControlSlots> out;
  ASSERT_EQ(control.running(out), 1);
  EXPECT_EQ(out[0].op, ControlOp::EXTENSION);
  EXPECT_EQ(out[0].arg, 12U);
  EXPECT_EQ(out[0].lane, Lane::kService);
  EXPECT_GE(out[0].started_ns, before);
  EXPECT_LE(out[0].started_ns, monotonic_now());
  may_end.open();
  world.finish(slot);
  EXPECT_EQ(control.running(out), 0);
}

}  // namespace
}  // namespace simpler
