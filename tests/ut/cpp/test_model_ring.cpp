// The task ring in every interleaving: order, results, room, skipping and a child that dies.
#include <gtest/gtest.h>

#include <memory>

#include "model/ring_ends.h"

namespace simpler::model {
namespace {

constexpr std::uint64_t kForEver = ~std::uint64_t{0};

std::shared_ptr<RingWorld<ModelAtom>> make_world(std::uint64_t begin) {
  auto world = std::make_shared<RingWorld<ModelAtom>>();
  world->begin_at(begin);
  world->ring.published.label("published");
  world->ring.completed.label("completed");
  world->ring.retired.label("retired");
  world->ring.event.label("event");
  world->ring.waiters.label("waiters");
  world->bell.pending.label("bell");
  world->bell.sleepers.label("sleepers");
  world->dead.label("dead");
  return world;
}

TEST(RingModel, TasksRunInOrderAndTheirResultsArrive) {
  const auto setup = [](Scenario& scenario) {
    auto world = make_world(62);  // the ring's end is among the three
    scenario.thread("parent", [world] {
      for (std::uint64_t seq = 63; seq <= 65; ++seq) world->publish(seq, seq * 10);
      for (std::uint64_t seq = 63; seq <= 65; ++seq) {
        check(world->wait_completed(seq), "it ends");
        check(world->retire(seq, seq * 10) == TaskStatus::kDone, "it is done");
      }
    });
    scenario.daemon("child", [world] { world->serve(62, kForEver); });
  };
  const Verdict verdict = explore({.preemptions = at_most(3), .store_buffers = true}, setup);
  EXPECT_TRUE(verdict.good()) << verdict.report;
}

TEST(RingModel, FullRingHasRoomAgainOnceATaskIsRetired) {
  const auto setup = [](Scenario& scenario) {
    auto world = make_world(0);
    for (std::uint64_t seq = 1; seq <= kTaskSlots; ++seq) {
      ring_slot(world->ring, seq).seq = seq;
      ring_slot(world->ring, seq).args_bytes = seq;
    }
    world->ring.published.store(kTaskSlots);
    scenario.thread("parent", [world] {
      for (std::uint64_t seq = 1; seq <= 2; ++seq) {
        check(world->wait_completed(seq), "it ends");
        world->retire(seq, seq);
        world->publish(kTaskSlots + seq, 7);
      }
      check(world->wait_completed(kTaskSlots + 2), "it ends");
      check(world->retire(kTaskSlots + 1, 7) == TaskStatus::kDone,
            "the new entry took the old one's place");
    });
    scenario.daemon("child", [world] { world->serve(0, kForEver); });
  };
  const Verdict verdict = explore({.preemptions = 1}, setup);
  EXPECT_TRUE(verdict.good()) << verdict.report;
}

TEST(RingModel, TG2_FailureSkipsWhatFollowsItAndNothingElse) {
  const auto setup = [](Scenario& scenario) {
    auto world = make_world(0);
    scenario.thread("parent", [world] {
      world->publish(1, 0);
      world->publish(2, 20, 1);
      world->publish(3, 30);
      world->publish(4, 40, 2);
      check(world->wait_completed(4), "they end");
      check(world->retire(1, 0) == TaskStatus::kFailed, "the first fails");
      check(world->retire(2, 20) == TaskStatus::kSkipped, "what follows it is skipped");
      check(world->retire(3, 30) == TaskStatus::kDone, "what does not is done");
      check(world->retire(4, 40) == TaskStatus::kSkipped, "what follows a skipped one is skipped");
    });
    scenario.daemon("child", [world] { world->serve(0, kForEver); });
  };
  const Verdict verdict = explore({.preemptions = at_most(2), .store_buffers = true}, setup);
  EXPECT_TRUE(verdict.good()) << verdict.report;
}

TEST(RingModel, TG2_AnEntryNamesAnyOfTheLastSixtyFour) {
  for (std::uint64_t back = 1; back <= 65; ++back) {
    TaskSlot<> slot;
    slot.seq = 200;
    slot.after_mask = after_bit(200, 200 - back);
    std::uint64_t failed = ring_note_end(0, TaskStatus::kFailed);  // of entry 200 - back
    EXPECT_EQ(ring_must_skip(slot, 0), false) << back;
    for (std::uint64_t i = 1; i < back; ++i) failed = ring_note_end(failed, TaskStatus::kDone);
    EXPECT_EQ(ring_must_skip(slot, failed), back <= 64) << back;
    EXPECT_FALSE(ring_must_skip(slot, ring_note_end(failed, TaskStatus::kDone))) << back;
  }
  EXPECT_EQ(after_bit(5, 5), 0U);
}

TEST(RingModel, TG2_OneOfSeveralNamedEntriesIsEnoughToSkip) {
  TaskSlot<> slot;
  slot.seq = 10;
  slot.after_mask = after_bit(10, 9) | after_bit(10, 4);
  std::uint64_t failed = ring_note_end(0, TaskStatus::kSkipped);  // entry 4
  for (int i = 5; i <= 9; ++i) failed = ring_note_end(failed, TaskStatus::kDone);
  EXPECT_TRUE(ring_must_skip(slot, failed));
  slot.after_mask = after_bit(10, 9) | after_bit(10, 5);
  EXPECT_FALSE(ring_must_skip(slot, failed));
  slot.flags = kTaskSkip;
  EXPECT_TRUE(ring_must_skip(slot, failed));
}

TEST(RingModel, ARecallIsOfOneEntryAndNotOfItsSuccessor) {
  TaskSlot<> slot;
  slot.seq = 10;
  slot.recalled.store(10);
  EXPECT_TRUE(ring_must_skip(slot, 0));
  slot.seq = 10 + kTaskSlots;
  EXPECT_FALSE(ring_must_skip(slot, 0));
}

TEST(RingModel, AClaimedEntryIsEitherBegunOrTakenBack) {
  struct Race {
    TaskSlot<ModelAtom> slot;
    ModelAtom<std::uint32_t> ended{0};
    bool is_begun = false;
    bool is_taken_back = false;
    void end() {
      if (ended.fetch_add(1, std::memory_order_acq_rel) == 1)
        check(is_begun != is_taken_back, "one of the two");
    }
  };
  const auto setup = [](Scenario& scenario) {
    auto race = std::make_shared<Race>();
    race->slot.seq = 10;
    race->slot.flags = kTaskClaim;
    scenario.thread("child", [race] {
      race->is_begun = !ring_must_skip(race->slot, 0);
      race->end();
    });
    scenario.thread("parent", [race] {
      race->is_taken_back = ring_take_back(race->slot, 10);
      check(!ring_take_back(race->slot, 10), "once");
      race->end();
    });
  };
  const Verdict verdict = explore({.preemptions = 3, .store_buffers = true}, setup);
  EXPECT_TRUE(verdict.good()) << verdict.report;
}

TEST(RingModel, WhoeverSleepsOnAllRingsIsWoken) {
  const auto setup = [](Scenario& scenario) {
    auto world = make_world(0);
    for (std::uint64_t seq = 1; seq <= 2; ++seq) {
      scenario.thread("waiter " + std::to_string(seq),
                      [world, seq] { world->sleep_on_all_rings(seq); });
    }
    scenario.thread("parent", [world] {
      world->publish(1, 10);
      world->publish(2, 20);
    });
    scenario.daemon("child", [world] { world->serve(0, kForEver); });
  };
  const Verdict verdict =
      explore({.preemptions = at_most(2), .spurious = kSanitized ? 0 : 1}, setup);
  EXPECT_TRUE(verdict.good()) << verdict.report;
}

TEST(RingModel, OneSleeperOnAllRingsIsWokenAlsoWithStoreBuffers) {
  const auto setup = [](Scenario& scenario) {
    auto world = make_world(0);
    scenario.thread("parent", [world] {
      world->publish(1, 10);
      world->sleep_on_all_rings(1);
      check(world->retire(1, 10) == TaskStatus::kDone, "its result is there");
    });
    scenario.daemon("child", [world] { world->serve(0, kForEver); });
  };
  const Verdict verdict = explore({.preemptions = at_most(3), .store_buffers = true}, setup);
  EXPECT_TRUE(verdict.good()) << verdict.report;
}

TEST(RingModel, ASleeperThatNeedNotHearOfEarlierEndsHearsOfItsOwn) {
  const auto setup = [](Scenario& scenario) {
    auto world = make_world(0);
    scenario.thread("parent", [world] {
      world->publish(1, 10);
      world->publish(2, 20);
      world->sleep_until(2);
      world->publish(3, 30);
      world->sleep_until(1);  // a mark that is behind
      world->sleep_until(3);
      check(world->retire(3, 30) == TaskStatus::kDone, "its result is there");
    });
    scenario.daemon("child", [world] { world->serve(0, kForEver); });
  };
  const Verdict verdict = explore({.preemptions = at_most(2), .store_buffers = true}, setup);
  EXPECT_TRUE(verdict.good()) << verdict.report;
}

TEST(RingModel, CP3_DeathEndsTheWaitForATask) {
  const auto setup = [](Scenario& scenario) {
    auto world = make_world(0);
    scenario.thread("parent", [world] {
      world->publish(1, 10);
      world->publish(2, 20);
      for (std::uint64_t seq = 1; seq <= 2 && world->wait_completed(seq); ++seq) {
        check(world->retire(seq, seq * 10) == TaskStatus::kDone, "what has ended is whole");
      }
    });
    const int child = scenario.mortal("child", [world] { world->serve(0, kForEver); });
    scenario.daemon("reaper", [world, child] {
      join(child);
      world->reap();
    });
  };
  const Verdict verdict = explore({.preemptions = at_most(2), .store_buffers = true}, setup);
  EXPECT_TRUE(verdict.good()) << verdict.report;
}

TEST(RingModel, SeveralWaitersAreAllWoken) {
  const auto setup = [](Scenario& scenario) {
    auto world = make_world(0);
    for (std::uint64_t seq = 1; seq <= 2; ++seq) {
      scenario.thread("waiter " + std::to_string(seq),
                      [world, seq] { check(world->wait_completed(seq), "it ends"); });
    }
    scenario.thread("parent", [world] {
      world->publish(1, 10);
      world->publish(2, 20);
    });
    scenario.daemon("child", [world] { world->serve(0, kForEver); });
  };
  const Verdict verdict =
      explore({.preemptions = at_most(1), .spurious = kSanitized ? 0 : 1}, setup);
  EXPECT_TRUE(verdict.good()) << verdict.report;
}

TEST(RingModelNotices, WaiterThatReadsTheEventAfterItsTest) {
  const auto setup = [](Scenario& scenario) {
    auto world = make_world(0);
    scenario.thread("parent", [world] {
      world->publish(1, 10);
      while (world->ring.completed.load(std::memory_order_acquire) < 1) {
        ring_sleep(world->ring, world->ring.event.load(std::memory_order_seq_cst),
                   Deadline::never());
      }
    });
    scenario.daemon("child", [world] { world->serve(0, kForEver); });
  };
  const Verdict verdict = explore({}, setup);
  EXPECT_EQ(verdict.failure, Failure::kDeadlock) << verdict.report;
}

TEST(RingModelNotices, SleeperOnAllRingsThatAnnouncesItselfAfterItsTest) {
  const auto setup = [](Scenario& scenario) {
    auto world = make_world(0);
    scenario.thread("parent", [world] {
      world->publish(1, 10);
      while (world->ring.completed.load(std::memory_order_seq_cst) < 1) {
        tasks_sleep(world->tasks_ended, [] { return false; }, Deadline::never());
      }
    });
    scenario.daemon("child", [world] { world->serve(0, kForEver); });
  };
  const Verdict verdict = explore({}, setup);
  EXPECT_EQ(verdict.failure, Failure::kDeadlock) << verdict.report;
}

TEST(RingModelNotices, ResultWrittenAfterItIsAnnounced) {
  const auto setup = [](Scenario& scenario) {
    auto world = make_world(0);
    scenario.thread("parent", [world] {
      world->publish(1, 10);
      world->wait_completed(1);
      world->retire(1, 10);
    });
    scenario.thread("child", [world] {
      while (ring_available(world->ring, 0) == 0) {
        if (bell_take(world->bell) == 0) bell_sleep(world->bell, Deadline::never());
      }
      ring_complete(world->ring, 1);
      world->results[0].write();
    });
  };
  const Verdict verdict = explore({}, setup);
  EXPECT_EQ(verdict.failure, Failure::kRace) << verdict.report;
}

}  // namespace
}  // namespace simpler::model
