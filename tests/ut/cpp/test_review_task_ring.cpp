// What a waiter for one task does for the tasks before it.
#include <gtest/gtest.h>

#include <thread>

#include "hierarchical/base/error.h"
#include "hierarchical/ipc/task_protocol.h"
#include "hierarchical/workers/child_process.h"

namespace simpler {
namespace {

constexpr Nanoseconds kWatchdog = 30'000'000'000;

TEST(TaskRingWait, RetiresEarlierResultsSoThatTheChildHasSpaceToEndTheOneWaitedFor) {
  TreeMemory memory(1, std::size_t{1} << 16, 4096, "review");
  ChildProcess child(memory, 0, true, 0, 0);
  TaskRing<>& ring = child.block.ring;
  const Deadline deadline = Deadline::at(monotonic_now() + kWatchdog);
  std::uint64_t first = 0;
  std::uint64_t second = 0;
  ASSERT_EQ(child.ring.publish(1, {}, 0, deadline, nullptr, first), TaskWait::kOk);
  ASSERT_EQ(child.ring.publish(1, {}, 0, deadline, nullptr, second), TaskWait::kOk);

  bool had_space = false;
  std::thread end([&] {
    for (const std::uint64_t seq : {first, second}) {
      TaskSlot<>& slot = ring_slot(ring, seq);
      slot.status = static_cast<std::uint32_t>(TaskStatus::kDone);
      slot.result_bytes = 1;
      slot.result_offset = memory.space(0).reply_base;
      ring_complete(ring, seq);
      if (seq == second) break;
      // As ReplyArena does for a result that fits only after the first is read.
      while (!had_space && !deadline.passed()) {
        const std::uint32_t seen = release_seen(child.block.replies_released);
        had_space = ring.retired.load() >= first;
        if (!had_space) release_sleep(child.block.replies_released, seen, deadline);
      }
    }
  });
  TaskOutcome outcome;
  EXPECT_EQ(child.ring.wait(second, deadline, nullptr, outcome), TaskWait::kOk);
  end.join();
  EXPECT_TRUE(had_space);
  EXPECT_EQ(outcome.status, TaskStatus::kDone);
  EXPECT_EQ(child.ring.wait(first, deadline, nullptr, outcome), TaskWait::kOk);
}

TEST(TreeMemory, RefusesPayloadsThatNoMachineCanAddress) {
  for (const std::size_t bytes : {~std::size_t{0}, std::size_t{1} << 62, std::size_t{1} << 60}) {
    EXPECT_THROW(TreeMemory(8, bytes, 4096, "review"), Error) << bytes;
  }
}

}  // namespace
}  // namespace simpler
