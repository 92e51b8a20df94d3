// One child's task ring, from both ends: the real parent's end and the real loop.
#include <gtest/gtest.h>

#include <limits>
#include <set>
#include <thread>
#include <vector>

#include "hierarchical/base/error.h"
#include "hierarchical/ipc/task_protocol.h"
#include "in_process_child.h"

namespace simpler {
namespace {

using testing::FakeInterrupt;
using testing::Gate;
using testing::InProcessChild;
using testing::make_child;
using testing::text_of;
using testing::wait_until;
using testing::watchdog;

const Deadline kNow = Deadline::at(0);

class TaskRingTest : public ::testing::Test {
 protected:
  InProcessChild& world = make_child();
  TaskRingParentEnd& ring = world.child.ring;
  Gate begun;
  Gate may_end;

  TaskRingTest() { world.main.start(); }
  ~TaskRingTest() override { world.main.stop(); }

  void hold_tasks() {
    world.handlers.on_task = [this](std::uint32_t, std::span<const std::byte> args,
                                    ReplyWriter& reply) {
      begun.open();
      may_end.wait();
      reply.write(ReplyStatus::kOk, args);
    };
  }
  TaskWait try_publish(Deadline deadline, Interrupt* interrupt = nullptr) {
    std::uint64_t seq = 0;
    return ring.publish(0, {}, 0, deadline, interrupt, seq);
  }
};

TEST_F(TaskRingTest, TasksRunInTheirOrderAndKeepTheirResults) {
  std::vector<std::uint32_t> order;
  world.handlers.on_task = [&](std::uint32_t id, std::span<const std::byte> args,
                               ReplyWriter& reply) {
    order.push_back(id);
    reply.write(ReplyStatus::kOk, args);
  };
  std::vector<std::uint64_t> numbers;
  for (std::uint32_t i = 0; i < 40; ++i) {
    numbers.push_back(world.publish("task " + std::to_string(i), 0, i));
  }
  for (std::size_t i = numbers.size(); i-- > 0;) {  // taken in another order than they ended
    EXPECT_EQ(numbers[i], i + 1);
    const TaskOutcome out = world.outcome(numbers[i]);
    EXPECT_EQ(out.status, TaskStatus::kDone);
    EXPECT_EQ(text_of(out.result), "task " + std::to_string(i));
    EXPECT_EQ(order[i], i);
  }
}

TEST_F(TaskRingTest, ArgumentsAndResultsAroundEveryBoundaryArriveWhole) {
  for (const std::size_t nbytes : {std::size_t{0}, std::size_t{1}, kTaskInlineBytes,
                                   kTaskInlineBytes + 1, std::size_t{1} << 20}) {
    const std::string args(nbytes, 'a');
    EXPECT_EQ(text_of(world.outcome(world.publish(args)).result), args) << nbytes;
  }
}

TEST_F(TaskRingTest, ArgumentsBeyondTheArenaAreRefusedBeforeAnythingIsSent) {
  const std::vector<std::byte> args(world.child.arena.capacity() + 1);
  std::uint64_t seq = 0;
  EXPECT_THROW(ring.publish(0, args, 0, watchdog(), nullptr, seq), Error);
  EXPECT_EQ(ring.published(), 0U);
}

TEST_F(TaskRingTest, TG4_AFullRingMakesPublishersWaitWithinTheirDeadline) {
  hold_tasks();
  for (int i = 0; i < kTaskSlots; ++i) world.publish();
  begun.wait();
  EXPECT_FALSE(ring.has_room_now());
  EXPECT_EQ(try_publish(kNow), TaskWait::kTimedOut);
  FakeInterrupt interrupt;
  interrupt.interrupt();
  EXPECT_EQ(try_publish(Deadline::never(), &interrupt), TaskWait::kInterrupted);
  std::uint64_t last = 0;
  std::thread publisher([&] { last = world.publish("last"); });
  may_end.open();
  publisher.join();
  EXPECT_EQ(last, static_cast<std::uint64_t>(kTaskSlots) + 1);
  EXPECT_EQ(text_of(world.outcome(last).result), "last");
}

TEST_F(TaskRingTest, ManyPublishersAndWaitersShareOneRing) {
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int index = 0; index < 8; ++index) {
    threads.emplace_back([&, index] {
      for (int i = 0; i < 200; ++i) {
        const std::string args = std::to_string(index) + ":" + std::to_string(i) +
                                 std::string(i % 7 == 0 ? 2000 : 0, '.');
        if (text_of(world.outcome(world.publish(args)).result) != args) wrong.fetch_add(1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong.load(), 0);
  EXPECT_EQ(ring.published(), 8U * 200U);
}

TEST_F(TaskRingTest, ADeadlineThatPassedAsksOnce) {
  hold_tasks();
  const std::uint64_t seq = world.publish("x");
  begun.wait();
  TaskOutcome out;
  EXPECT_EQ(ring.wait(seq, kNow, nullptr, out), TaskWait::kTimedOut);
  may_end.open();
  EXPECT_EQ(text_of(world.outcome(seq).result), "x");
  EXPECT_EQ(ring.wait(world.publish("y"), watchdog(), nullptr, out), TaskWait::kOk);
}

TEST_F(TaskRingTest, AnOutcomeIsTakenOnceAndOnlyOfAPublishedTask) {
  const std::uint64_t seq = world.publish();
  world.outcome(seq);
  TaskOutcome out;
  EXPECT_THROW(ring.wait(seq, watchdog(), nullptr, out), Error);
  EXPECT_THROW(ring.wait(seq + 1, watchdog(), nullptr, out), Error);
  EXPECT_THROW(ring.wait(0, watchdog(), nullptr, out), Error);
}

TEST_F(TaskRingTest, OnlyATimedEntryTellsWhenItBeganAndEnded) {
  const Nanoseconds before = monotonic_now();
  TaskEntry timed;
  timed.is_timed = true;
  ring.fill(timed);
  ring.fill(TaskEntry{});
  ring.recall(ring.fill(timed));
  ring.flush();
  wait_until([&] { return ring.ended_count() == 3; });
  const Nanoseconds after = monotonic_now();
  std::vector<TaskView> views;
  ring.take_ended([&](std::uint64_t, const TaskView& view) { views.push_back(view); });
  ASSERT_EQ(views.size(), 3U);
  EXPECT_EQ(views[0].status, TaskStatus::kDone);
  EXPECT_GE(views[0].started_ns, before);
  EXPECT_GE(views[0].ended_ns, views[0].started_ns);
  EXPECT_EQ(views[1].started_ns, 0);
  EXPECT_EQ(views[1].ended_ns, 0);
  EXPECT_EQ(views[2].status, TaskStatus::kSkipped);
  EXPECT_GE(views[2].started_ns, views[0].ended_ns) << "entries run one after another";
  EXPECT_GE(views[2].ended_ns, views[2].started_ns);
  EXPECT_LE(views[2].ended_ns, after);
}

TEST_F(TaskRingTest, ATaskAfterAFailedOneIsSkippedAndSoIsWhatFollowsIt) {
  std::set<std::uint32_t> ran;
  world.handlers.on_task = [&](std::uint32_t id, std::span<const std::byte>, ReplyWriter& reply) {
    ran.insert(id);
    reply.write(id == 1 ? ReplyStatus::kFailure : ReplyStatus::kOk, testing::bytes_of("why"));
  };
  const std::uint64_t failed = world.publish({}, 0, 1);
  const std::uint64_t skipped = world.publish({}, failed, 2);
  const std::uint64_t skipped_too = world.publish({}, skipped, 3);
  const std::uint64_t other = world.publish({}, 0, 4);
  const TaskOutcome failure = world.outcome(failed);
  EXPECT_EQ(failure.status, TaskStatus::kFailed);
  EXPECT_EQ(text_of(failure.result), "why");
  EXPECT_EQ(world.outcome(skipped).status, TaskStatus::kSkipped);
  EXPECT_EQ(world.outcome(skipped_too).status, TaskStatus::kSkipped);
  EXPECT_EQ(world.outcome(other).status, TaskStatus::kDone);
  EXPECT_EQ(ran, (std::set<std::uint32_t>{1, 4}));
}

TEST_F(TaskRingTest, ATaskFarBehindAFailedOneIsSkippedAllTheSame) {
  world.handlers.on_task = [&](std::uint32_t id, std::span<const std::byte>, ReplyWriter& reply) {
    reply.write(id == 1 ? ReplyStatus::kFailure : ReplyStatus::kOk, {});
  };
  const std::uint64_t failed = world.publish({}, 0, 1);
  for (int i = 0; i < 3 * kTaskSlots; ++i) world.outcome(world.publish());
  EXPECT_EQ(world.outcome(world.publish({}, failed, 2)).status, TaskStatus::kSkipped);
}

TEST_F(TaskRingTest, TheRunningTaskIsDescribedWithItsStart) {
  hold_tasks();
  EXPECT_FALSE(ring.running());
  const Nanoseconds before = monotonic_now();
  const std::uint64_t seq = world.publish({}, 0, 9);
  begun.wait();
  const auto running = ring.running();
  ASSERT_TRUE(running);
  EXPECT_EQ(running->seq, seq);
  EXPECT_EQ(running->callable_id, 9U);
  EXPECT_GE(running->started_ns, before);
  may_end.open();
  world.outcome(seq);
}

TEST_F(TaskRingTest, CP3_WaitersOfADeadChildWakeAndPublishersAreRefused) {
  hold_tasks();
  const std::uint64_t seq = world.publish();
  begun.wait();
  std::thread waiter([&] {
    TaskOutcome out;
    EXPECT_EQ(ring.wait(seq, Deadline::never(), nullptr, out), TaskWait::kPeerGone);
  });
  ring.fail_all();
  waiter.join();
  EXPECT_EQ(try_publish(Deadline::never()), TaskWait::kPeerGone);
  may_end.open();
}

// The child as an enemy: no loop runs, the test writes what a child may write.
class HostileRing : public ::testing::Test {
 protected:
  InProcessChild& world = make_child(std::size_t{1} << 16);
  TaskRingParentEnd& parent = world.child.ring;
  TaskRing<>& ring = world.child.block.ring;
  const PayloadSpace space = world.memory.space(0);

  void expect_protocol_error(std::uint64_t seq) {
    TaskOutcome out;
    try {
      parent.wait(seq, watchdog(), nullptr, out);
      ADD_FAILURE() << "believed";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kProtocol);
    }
  }
};

TEST_F(HostileRing, ResultsOutOfBoundsAreRefused) {
  const std::pair<std::uint64_t, std::uint64_t> places[] = {
      {kInline, kTaskInlineBytes + 1},
      {kInline, ~std::uint64_t{0}},
      {space.request_base, 16},
      {space.reply_base - 1, 1},
      {space.reply_base, space.reply_bytes + 1},
      {space.reply_base + 4096, ~std::uint64_t{0} - 4096},
      {~std::uint64_t{0} - 1, 4}};
  for (const auto& [offset, nbytes] : places) {
    const std::uint64_t seq = world.publish();
    TaskSlot<>& slot = ring_slot(ring, seq);
    slot.status = static_cast<std::uint32_t>(TaskStatus::kDone);
    slot.result_offset = offset;
    slot.result_bytes = nbytes;
    ring_complete(ring, seq);
    expect_protocol_error(seq);
  }
}

TEST_F(HostileRing, AnUnknownStatusIsRefused) {
  for (const std::uint32_t status : {0U, 4U, ~0U}) {
    const std::uint64_t seq = world.publish();
    TaskSlot<>& slot = ring_slot(ring, seq);
    slot.status = status;
    slot.result_offset = kInline;
    slot.result_bytes = 0;
    ring_complete(ring, seq);
    expect_protocol_error(seq);
  }
}

TEST_F(HostileRing, CountersOfTasksNeverPublishedAreNotBelieved) {
  const std::uint64_t seq = world.publish();
  ring_complete(ring, std::numeric_limits<std::uint64_t>::max());
  expect_protocol_error(seq);
  ring.begun.store(0);
  EXPECT_FALSE(parent.running());
  ring.begun.store(std::numeric_limits<std::uint64_t>::max());
  EXPECT_FALSE(parent.running());
  const std::uint64_t next = world.publish();
  EXPECT_EQ(next, seq + 1);
  expect_protocol_error(next);
}

TEST_F(HostileRing, ACounterThatGoesBackwardsOnlyMakesWaitersWait) {
  const std::uint64_t seq = world.publish();
  TaskSlot<>& slot = ring_slot(ring, seq);
  slot.status = static_cast<std::uint32_t>(TaskStatus::kDone);
  ring_complete(ring, seq);
  EXPECT_EQ(world.outcome(seq).status, TaskStatus::kDone);
  ring_complete(ring, 0);
  TaskOutcome out;
  EXPECT_EQ(parent.wait(world.publish(), kNow, nullptr, out), TaskWait::kTimedOut);
}

TEST_F(HostileRing, ANewIncarnationStartsBehindTheTasksThatDiedWithTheOld) {
  const std::uint64_t finished = world.publish();
  const std::uint64_t lost = world.publish();
  ring_slot(ring, finished).status = static_cast<std::uint32_t>(TaskStatus::kDone);
  ring_complete(ring, finished);
  parent.fail_all();
  parent.reset();
  std::uint64_t seq = 0;
  EXPECT_EQ(parent.publish(0, {}, 0, kNow, nullptr, seq), TaskWait::kPeerGone) << "before open()";
  parent.open();
  EXPECT_EQ(world.outcome(finished).status, TaskStatus::kDone) << "it had ended before the death";
  TaskOutcome out;
  EXPECT_EQ(parent.wait(lost, watchdog(), nullptr, out), TaskWait::kPeerGone);
  seq = world.publish();
  EXPECT_EQ(seq, lost + 1);
  EXPECT_EQ(parent.wait(seq, kNow, nullptr, out), TaskWait::kTimedOut);
}

}  // namespace
}  // namespace simpler
