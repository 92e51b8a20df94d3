// Bells and release events in every interleaving: nobody sleeps through a ring.
#include <gtest/gtest.h>

#include <memory>

#include "hierarchical/ipc/bell.h"
#include "model/atom.h"

namespace simpler::model {
namespace {

struct BellWorld {
  Bell<ModelAtom> bell;
  std::uint32_t got = 0;  // by all owners; observed, no part of the protocol
  Guarded work[2];
};

std::shared_ptr<BellWorld> make_world() {
  auto world = std::make_shared<BellWorld>();
  world->bell.pending.label("pending");
  world->bell.sleepers.label("sleepers");
  return world;
}

void take_all(BellWorld& world, Deadline deadline = Deadline::never()) {
  for (;;) {
    const std::uint32_t bits = bell_take(world.bell);
    for (std::uint32_t i = 0; i < 2; ++i) {
      if ((bits & (1U << i)) != 0) world.work[i].read();
    }
    world.got |= bits;
    if (bits == 0) bell_sleep(world.bell, deadline);
  }
}

template <typename Ring, typename Take>
void ring_and_take(Scenario& scenario, int ringers, int owners, Ring ring, Take take) {
  auto world = make_world();
  for (int i = 0; i < ringers; ++i) {
    scenario.thread("ringer " + std::to_string(i), [world, ring, i] {
      world->work[i].write();
      ring(world->bell, 1U << static_cast<unsigned>(i));
    });
  }
  for (int i = 0; i < owners; ++i)
    scenario.daemon("owner " + std::to_string(i), [world, take] { take(*world); });
  scenario.finally([world, ringers] {
    check(world->bell.pending.load() == 0, "no owner sleeps while a bit is set");
    check(world->got == (1U << static_cast<unsigned>(ringers)) - 1, "each bit was taken");
  });
}

const auto kRing = [](Bell<ModelAtom>& bell, std::uint32_t bits) { bell_ring(bell, bits); };
const auto kTake = [](BellWorld& world) { take_all(world); };

TEST(BellModel, CP11_SleepingOwnerIsWokenByEachRinger) {
  const Verdict verdict = explore({.preemptions = at_most(4), .store_buffers = true},
                                  [](Scenario& s) { ring_and_take(s, 2, 1, kRing, kTake); });
  EXPECT_TRUE(verdict.good()) << verdict.report;
}

TEST(BellModel, CP11_OneOfSeveralSleepersTakesWhatIsRung) {
  const Verdict verdict = explore({.preemptions = at_most(2), .store_buffers = true},
                                  [](Scenario& s) { ring_and_take(s, 2, 2, kRing, kTake); });
  EXPECT_TRUE(verdict.good()) << verdict.report;
}

TEST(BellModel, SpuriousWakeUpsAndSignalsLoseNothing) {
  const Verdict verdict = explore({.preemptions = at_most(2), .spurious = 1, .signals = 1},
                                  [](Scenario& s) { ring_and_take(s, 2, 1, kRing, kTake); });
  EXPECT_TRUE(verdict.good()) << verdict.report;
}

TEST(BellModel, RingThatMeetsATimeOutIsStillTaken) {
  const auto setup = [](Scenario& scenario) {
    auto world = make_world();
    scenario.thread("ringer", [world] {
      world->work[0].write();
      bell_ring(world->bell, 1U);
    });
    scenario.thread("owner", [world] {
      while (world->got == 0) {
        bell_sleep(world->bell, Deadline::at(0));
        world->got |= bell_take(world->bell);
      }
      world->work[0].read();
      check(world->bell.sleepers.load() == 0, "an owner that is awake is not announced as asleep");
    });
  };
  const Verdict verdict =
      explore({.preemptions = at_most(4), .timeouts = 2, .store_buffers = true}, setup);
  EXPECT_TRUE(verdict.good()) << verdict.report;
}

TEST(BellModelNotices, OwnerThatDoesNotAnnounceItself) {
  const auto take = [](BellWorld& world) {
    for (;;) {
      world.got |= bell_take(world.bell);
      if (world.bell.pending.load(std::memory_order_seq_cst) == 0)
        futex_wait(world.bell.pending, 0U, Deadline::never());
    }
  };
  const Verdict verdict = explore({}, [&](Scenario& s) { ring_and_take(s, 1, 1, kRing, take); });
  EXPECT_EQ(verdict.failure, Failure::kCheck) << verdict.report;
}

TEST(BellModelNotices, RingerThatLooksForSleepersFirst) {
  const auto ring = [](Bell<ModelAtom>& bell, std::uint32_t bits) {
    const bool asleep = bell.sleepers.load(std::memory_order_seq_cst) != 0;
    bell.pending.fetch_or(bits, std::memory_order_seq_cst);
    if (asleep) futex_wake(bell.pending, 1);
  };
  const Verdict verdict = explore({}, [&](Scenario& s) { ring_and_take(s, 1, 1, ring, kTake); });
  EXPECT_EQ(verdict.failure, Failure::kCheck) << verdict.report;
}

TEST(BellModelNotices, RingThatStaysInTheStoreBuffer) {
  const auto ring = [](Bell<ModelAtom>& bell, std::uint32_t bits) {
    bell.pending.store(bits, std::memory_order_release);
    if (bell.sleepers.load(std::memory_order_seq_cst) != 0) futex_wake(bell.pending, 1);
  };
  const auto setup = [&](Scenario& s) { ring_and_take(s, 1, 1, ring, kTake); };
  EXPECT_TRUE(explore({}, setup).good());
  const Verdict verdict = explore({.store_buffers = true}, setup);
  EXPECT_EQ(verdict.failure, Failure::kCheck) << verdict.report;
}

TEST(BellModelNotices, RingThatPublishesNothing) {
  const auto ring = [](Bell<ModelAtom>& bell, std::uint32_t bits) {
    bell.pending.fetch_or(bits, std::memory_order_relaxed);
    if (bell.sleepers.load(std::memory_order_seq_cst) != 0) futex_wake(bell.pending, 1);
  };
  const Verdict verdict = explore({}, [&](Scenario& s) { ring_and_take(s, 1, 1, ring, kTake); });
  EXPECT_EQ(verdict.failure, Failure::kRace) << verdict.report;
}

struct ReleaseWorld {
  ReleaseEvent<ModelAtom> event;
  ModelAtom<std::uint32_t> available{0};
};

bool take_one(ReleaseWorld& world) {
  std::uint32_t have = world.available.load(std::memory_order_acquire);
  while (have != 0) {
    if (world.available.compare_exchange_strong(have, have - 1, std::memory_order_acq_rel))
      return true;
  }
  return false;
}

template <typename Wait>
void release_to_two(Scenario& scenario, Wait wait) {
  auto world = std::make_shared<ReleaseWorld>();
  world->event.count.label("released");
  world->event.waiters.label("waiters");
  world->available.label("available");
  for (int i = 0; i < 2; ++i)
    scenario.thread("waiter " + std::to_string(i), [world, wait] { wait(*world); });
  scenario.thread("releaser", [world] {
    for (int i = 0; i < 2; ++i) {
      world->available.fetch_add(1, std::memory_order_release);
      release_notify(world->event);
    }
  });
}

TEST(ReleaseModel, EveryWaiterGetsWhatIsReleased) {
  const auto wait = [](ReleaseWorld& world) {
    for (;;) {
      const std::uint32_t seen = release_seen(world.event);
      if (take_one(world)) return;
      release_sleep(world.event, seen, Deadline::never());
    }
  };
  const Verdict verdict = explore({.preemptions = at_most(3), .spurious = 1, .store_buffers = true},
                                  [&](Scenario& s) { release_to_two(s, wait); });
  EXPECT_TRUE(verdict.good()) << verdict.report;
}

TEST(ReleaseModelNotices, WaiterThatReadsTheCountAfterItsTest) {
  const auto wait = [](ReleaseWorld& world) {
    while (!take_one(world))
      release_sleep(world.event, release_seen(world.event), Deadline::never());
  };
  const Verdict verdict = explore({}, [&](Scenario& s) { release_to_two(s, wait); });
  EXPECT_EQ(verdict.failure, Failure::kDeadlock) << verdict.report;
}

}  // namespace
}  // namespace simpler::model
