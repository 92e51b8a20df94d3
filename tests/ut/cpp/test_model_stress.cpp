// The ends of the model tests with std::atomic and real futexes, both sides as threads of one
// process: what the explorer does not model, weak memory of the real machine and plain data races,
// is left to chance and ThreadSanitizer. A lost wake-up shows as a test that does not end; the
// runner's time limit is the watchdog.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "hierarchical/ipc/spin.h"
#include "model/control_ends.h"
#include "model/ring_ends.h"

namespace simpler::model {
namespace {

constexpr std::uint32_t kStop = 1U << 30U;
using Control = ControlWorld<std::atomic>;

Deadline soon(std::mt19937& random) {
  return Deadline::at(monotonic_now() + static_cast<int>(random() % 60'000));
}

TEST(ControlStress, CP1_CallersThatGiveUpAtAnyTimeNeverMixReplies) {
  constexpr std::uint64_t kCalls = kSanitized ? 500 : 1900;
  auto world = std::make_unique<Control>();
  world->used = 2;
  std::thread main_thread([&] { world->serve_all(Lane::kMain, kStop); });
  std::thread service_thread([&] { world->serve_all(Lane::kService, kStop); });
  std::vector<std::thread> callers;
  for (std::uint64_t index = 0; index < 2; ++index) {
    callers.emplace_back([&, index] {
      std::mt19937 random(static_cast<unsigned>(index));
      for (std::uint64_t call = 0; call < kCalls; ++call) {
        const std::uint64_t id = 1 + call * 2 + index;
        const auto lane = static_cast<Lane>(random() % 3);
        const Outcome outcome = world->call(index, id, soon(random), lane);
        if (outcome == Outcome::kAbandoned) world->reclaim(index);
        check(outcome != Outcome::kPeerGone, "nobody died");
        world->check_ran_once_iff(id, outcome);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  bell_ring(world->main_bell, kStop);
  bell_ring(world->service_bell, kStop);
  main_thread.join();
  service_thread.join();
  world->check_all_idle();
}

// Serves some requests, and dies with the next one claimed, replied to but not announced, or not
// yet seen.
void serve_until_death(Control& world, unsigned requests, unsigned phase) {
  while (requests > 0) {
    const std::uint32_t bits = bell_take(world.main_bell);
    if (bits == 0) bell_sleep(world.main_bell, Deadline::never());
    for (std::size_t index = 0; index < world.used && requests > 0; ++index) {
      if ((bits & (1U << index)) != 0 && world.serve(index, Lane::kMain)) --requests;
    }
  }
  if (phase == 0 || !slot_claim(world.slots[0], Lane::kMain) || phase == 1) return;
  world.slots[0].reply_id = world.slots[0].request_id;
  world.slots[0].bytes[0] = static_cast<std::byte>(world.slots[0].request_id + 1);
  world.runs[world.slots[0].request_id].fetch_add(1);
  slot_move(world.slots[0], SlotState::kRunning, SlotState::kReplied);
}

TEST(ControlStress, CP3_DeathAtAnyPhaseFailsWhoeverWaits) {
  constexpr int kRounds = kSanitized ? 100 : 400;
  std::mt19937 random(3);
  for (int round = 0; round < kRounds; ++round) {
    auto world = std::make_unique<Control>();
    world->used = 2;
    std::thread child([&, requests = 1 + random() % 4, phase = random() % 3] {
      serve_until_death(*world, static_cast<unsigned>(requests), static_cast<unsigned>(phase));
    });
    std::vector<std::thread> callers;
    for (std::uint64_t index = 0; index < 2; ++index) {
      callers.emplace_back([&, index] {
        std::uint64_t id = 1 + index;
        while (world->call(index, id, Deadline::never()) != Outcome::kPeerGone) id += 2;
        world->check_ran_once_iff(id, Outcome::kPeerGone);
      });
    }
    child.join();
    world->reap();
    for (std::thread& caller : callers) caller.join();
    world->check_all_idle();
  }
}

TEST(BellStress, CP11_NoRingIsSleptThrough) {
  constexpr std::uint32_t kRings = kSanitized ? 3000 : 20000;
  Bell<> bell;
  std::array<std::atomic<std::uint32_t>, 2> rung{}, heard{};
  std::vector<std::thread> ringers;
  for (std::size_t i = 0; i < 2; ++i) {
    ringers.emplace_back([&, i] {
      for (std::uint32_t ring = 1; ring <= kRings; ++ring) {
        rung[i].store(ring, std::memory_order_relaxed);
        bell_ring(bell, 1U << i);
        // Every few rings the owner is let fall asleep.
        while (ring % 16 == 0 && heard[i].load(std::memory_order_relaxed) < ring) cpu_relax();
      }
    });
  }
  while (heard[0].load() < kRings || heard[1].load() < kRings) {
    const std::uint32_t bits = bell_take(bell);
    if (bits == 0) bell_sleep(bell, Deadline::never());
    for (std::size_t i = 0; i < 2; ++i) {
      if ((bits & (1U << i)) != 0)
        heard[i].store(rung[i].load(std::memory_order_relaxed), std::memory_order_relaxed);
    }
  }
  for (std::thread& ringer : ringers) ringer.join();
  EXPECT_EQ(bell.sleepers.load(), 0U);
}

TEST(RingStress, TG2_OrderResultsAndSkipsHoldThroughManyRounds) {
  constexpr std::uint64_t kTasks = kSanitized ? 3000 : 20000;
  auto world = std::make_unique<RingWorld<std::atomic>>();
  std::thread child([&] { world->serve(0, kTasks); });
  std::mt19937 random(5);
  std::vector<bool> good(kTasks + 1, true);
  std::vector<std::uint64_t> values(kTasks + 1), followed(kTasks + 1);
  std::uint64_t retired = 0;
  const auto retire_one = [&] {
    ++retired;
    ASSERT_TRUE(world->wait_completed(retired));
    const TaskStatus status = world->retire(retired, values[retired]);
    const std::uint64_t after = followed[retired];
    const bool skipped = after != 0 && !good[after];
    const TaskStatus ran = values[retired] != 0 ? TaskStatus::kDone : TaskStatus::kFailed;
    ASSERT_EQ(status, skipped ? TaskStatus::kSkipped : ran)
        << "task " << retired << " after " << after;
    good[retired] = status == TaskStatus::kDone;
  };
  for (std::uint64_t seq = 1; seq <= kTasks; ++seq) {
    const std::uint64_t room = kTaskSlots - random() % 8;
    while (seq - retired > room) retire_one();
    values[seq] = random() % 10;
    const std::uint64_t back = 1 + random() % 80;  // also further than the ring is long
    followed[seq] = random() % 2 == 0 && back < seq ? seq - back : 0;
    const bool known_bad = followed[seq] != 0 && followed[seq] <= retired && !good[followed[seq]];
    world->publish(seq, values[seq], followed[seq], known_bad);
  }
  while (retired < kTasks) retire_one();
  child.join();
}

TEST(ReleaseStress, EveryUnitReleasedIsTaken) {
  constexpr std::uint32_t kUnits = kSanitized ? 2000 : 10000;
  ReleaseEvent<> event;
  std::atomic<std::uint32_t> available{0};
  std::vector<std::thread> takers;
  for (int i = 0; i < 3; ++i) {
    takers.emplace_back([&] {
      for (std::uint32_t taken = 0; taken < kUnits;) {
        const std::uint32_t seen = release_seen(event);
        std::uint32_t have = available.load(std::memory_order_acquire);
        if (have != 0 && available.compare_exchange_strong(have, have - 1)) {
          ++taken;
        } else if (have == 0) {
          release_sleep(event, seen, Deadline::never());
        }
      }
    });
  }
  for (std::uint32_t unit = 0; unit < 3 * kUnits; ++unit) {
    available.fetch_add(1, std::memory_order_release);
    release_notify(event);
  }
  for (std::thread& taker : takers) taker.join();
  EXPECT_EQ(available.load(), 0U);
  EXPECT_EQ(event.waiters.load(), 0U);
}

TEST(SpinStress, CP11_SeatsNeverExceedTheLimit) {
  constexpr int kRounds = kSanitized ? 5000 : 50000;
  auto tree = std::make_unique<TreeHeader<>>();
  tree->spin_limit = 2;
  std::atomic<std::uint32_t> seated{0};
  std::vector<std::thread> spinners;
  for (int i = 0; i < 4; ++i) {
    spinners.emplace_back([&, i] {
      for (int round = 0; round < kRounds; ++round) {
        const std::uint64_t seat = spin_sit(*tree, i == 0 ? std::uint64_t{1} : kCallerSeats);
        if (seat == 0) continue;
        check(seated.fetch_add(1) < 2, "no more spinners than the limit");
        seated.fetch_sub(1);
        spin_leave(*tree, seat);
      }
    });
  }
  for (std::thread& spinner : spinners) spinner.join();
  EXPECT_EQ(tree->spinners.load(), 0U);
}

}  // namespace
}  // namespace simpler::model
