#include "hierarchical/sched/async_calls.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "in_process_tree.h"

namespace simpler {
namespace {

using testing::Gate;
using testing::InProcessChild;
using testing::InProcessTree;
using testing::text_of;
using testing::watchdog;

const Deadline kNow = Deadline::at(1);

class AsyncCallsTest : public ::testing::Test {
 protected:
  InProcessTree& world = testing::make_immortal<InProcessTree>(2);
  AsyncCalls& calls = world.tree.async();
  Gate begun;
  Gate may_end;
  bool started = false;

  ~AsyncCallsTest() override {
    if (started) world.stop();
  }
  void start() {
    started = true;
    world.start();
  }
  std::uint64_t submit(std::string_view payload, Deadline deadline = watchdog(),
                       std::uint64_t hold = 0) {
    return calls.submit(0, InProcessChild::request(Lane::kMain, payload, deadline, hold));
  }
  void hold_handlers() {
    world.handlers[0]->on_control = [this](const ChildRequest& request, ReplyWriter& reply) {
      begun.open();
      may_end.wait();
      reply.write(ReplyStatus::kOk, request.payload);
    };
  }
  std::vector<AsyncEvent> take(std::size_t count) {
    std::vector<AsyncEvent> events;
    while (events.size() < count) {
      for (AsyncEvent& event : calls.wait_events()) events.push_back(std::move(event));
    }
    EXPECT_EQ(events.size(), count);
    return events;
  }
  bool nothing_is_left() {
    calls.finish();
    return calls.wait_events().empty();
  }
};

TEST_F(AsyncCallsTest, EverySubmittedCallEndsInOneEventWithItsReply) {
  std::map<std::uint64_t, std::string> expected;
  for (int i = 0; i < 200; ++i) {  // far more than there are slots
    const std::string payload =
        std::to_string(i) + std::string(i % 10 == 0 ? kSlotInlineBytes : 0, '.');
    expected[submit(payload)] = payload;
  }
  EXPECT_GT(calls.queued(0), 0U);
  start();
  for (const AsyncEvent& event : take(expected.size())) {
    EXPECT_EQ(event.kind, AsyncEvent::Kind::kReply);
    EXPECT_EQ(event.worker, 0);
    EXPECT_EQ(event.error, nullptr);
    EXPECT_EQ(text_of(event.bytes), expected.at(event.number));
    expected.erase(event.number);
  }
  EXPECT_TRUE(expected.empty());
  EXPECT_EQ(calls.queued(0), 0U);
  EXPECT_TRUE(nothing_is_left());
}

TEST_F(AsyncCallsTest, TheCallersMemoryIsItsOwnAgainAtOnce) {
  std::string payload = "before";
  for (int i = 0; i < kControlSlots; ++i) submit("fills the slots");
  const std::uint64_t token = submit(payload);
  payload = "after!";
  start();
  for (const AsyncEvent& event : take(kControlSlots + 1)) {
    if (event.number != token) continue;
    EXPECT_EQ(text_of(event.bytes), "before");
  }
}

TEST_F(AsyncCallsTest, AnErrorOfTheChildIsTheEventsError) {
  world.handlers[0]->on_control = [](const ChildRequest&, ReplyWriter& reply) {
    reply.write(ReplyStatus::kFailure, encode_failure({"KeyError", "no", "", false}));
  };
  start();
  submit("x");
  const auto events = take(1);
  ASSERT_NE(events[0].error, nullptr);
  EXPECT_EQ(events[0].error->failure.type_name, "KeyError");
}

TEST_F(AsyncCallsTest, TG4_AFullQueueRefusesAndSaysWhatToDo) {
  const std::size_t room = AsyncCalls::kMaxQueued + kControlSlots - 1;
  for (std::size_t i = 0; i < room; ++i) submit("x");
  try {
    submit("one too many");
    FAIL() << "accepted";
  } catch (const CallError& error) {
    EXPECT_EQ(error.kind, CallError::Kind::kBackPressure);
  }
  EXPECT_THROW(calls.submit_broadcast(InProcessChild::request(Lane::kMain), {}), CallError);
  EXPECT_EQ(calls.queued(1), 0U) << "no chip gets half a broadcast";
  start();
  take(room);
}

TEST_F(AsyncCallsTest, CP8_ACancelledCallNeverBeginsAndEndsWithoutAnEvent) {
  const std::uint64_t posted = submit("posted");
  std::uint64_t queued = 0;
  for (int i = 0; i < kControlSlots; ++i) queued = submit("x");
  EXPECT_TRUE(calls.cancel(posted));
  EXPECT_TRUE(calls.cancel(queued));
  EXPECT_FALSE(calls.cancel(posted)) << "once";
  start();
  for (const AsyncEvent& event : take(kControlSlots - 1)) {
    EXPECT_NE(event.number, posted);
    EXPECT_NE(event.number, queued);
  }
  EXPECT_TRUE(nothing_is_left());
}

TEST_F(AsyncCallsTest, ACallThatHasBegunCannotBeCancelled) {
  hold_handlers();
  start();
  const std::uint64_t token = submit("x");
  begun.wait();
  EXPECT_FALSE(calls.cancel(token));
  may_end.open();
  EXPECT_EQ(text_of(take(1)[0].bytes), "x");
}

TEST_F(AsyncCallsTest, CP2_TheDeadlineCountsPostedAndQueuedCallsAlike) {
  std::set<std::uint64_t> tokens;
  for (int i = 0; i < kControlSlots + 5; ++i) tokens.insert(submit("x", kNow, 5));
  for (const AsyncEvent& event : take(tokens.size())) {
    ASSERT_NE(event.error, nullptr);
    EXPECT_EQ(event.error->kind, CallError::Kind::kTimedOut);
    EXPECT_FALSE(event.error->started);
    EXPECT_EQ(tokens.erase(event.number), 1U);
  }
  EXPECT_TRUE(nothing_is_left()) << "what never began holds nothing";
}

TEST_F(AsyncCallsTest, CP8_ACallThatTimedOutWhileItRanEndsItsHoldWhenItEnds) {
  hold_handlers();
  start();
  submit("x", Deadline::after_seconds(0.05), 77);
  begun.wait();
  const auto timed_out = take(1);
  ASSERT_NE(timed_out[0].error, nullptr);
  EXPECT_TRUE(timed_out[0].error->started);
  may_end.open();
  const auto ended = take(1);
  EXPECT_EQ(ended[0].kind, AsyncEvent::Kind::kEnded);
  EXPECT_EQ(ended[0].number, 77U);
  EXPECT_EQ(world.child(0).control.counters().late_replies.load(), 1U);
}

TEST_F(AsyncCallsTest, CP3_CallsOfAChildThatIsGoneEndAtOnceAndOthersGoOn) {
  start();
  world.child(0).control.fail_all(false);
  for (int i = 0; i < kControlSlots + 5; ++i) submit("x");
  for (const AsyncEvent& event : take(kControlSlots + 5)) EXPECT_NE(event.error, nullptr);
  calls.submit(1, InProcessChild::request(Lane::kMain, "alive"));
  EXPECT_EQ(text_of(take(1)[0].bytes), "alive");
}

TEST_F(AsyncCallsTest, EventsPushedByOthersComeInBetween) {
  calls.push({AsyncEvent::Kind::kLog, 1, 0, {}, "text", nullptr});
  const auto events = take(1);
  EXPECT_EQ(events[0].kind, AsyncEvent::Kind::kLog);
  EXPECT_EQ(events[0].text, "text");
}

TEST_F(AsyncCallsTest, AQueuedCallIsPostedWhenASlotComesFreeElsewhere) {
  ControlParentEnd& control = world.child(0).control;
  std::vector<int> slots;
  for (int slot = control.poll_slot(); slot >= 0; slot = control.poll_slot()) slots.push_back(slot);
  start();
  testing::Dispatcher dispatcher(calls);
  submit("queued");
  EXPECT_EQ(calls.queued(0), 1U);
  control.release(slots[0]);
  EXPECT_TRUE(dispatcher.wait_for(AsyncEvent::Kind::kReply, 1));
  for (std::size_t i = 1; i < slots.size(); ++i) control.release(slots[i]);
}

TEST_F(AsyncCallsTest, ARequestWaitsForSpaceInTheArenaAndIsSentOnceThereIs) {
  std::shared_ptr<StagedBlock> all;
  RequestArena& arena = world.child(0).arena;
  ASSERT_EQ(arena.wait_stage(arena.capacity(), kNow, nullptr, all), ArenaWait::kOk);
  start();
  testing::Dispatcher dispatcher(calls);
  submit(std::string(kSlotInlineBytes + 1, 'x'));
  EXPECT_EQ(calls.queued(0), 1U);
  all.reset();
  EXPECT_TRUE(dispatcher.wait_for(AsyncEvent::Kind::kReply, 1));
}

}  // namespace
}  // namespace simpler
