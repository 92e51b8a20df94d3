// The queue of ready tasks and the map of ranges, each against a slow model of its own.
#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <vector>

#include <gtest/gtest.h>

#include "hierarchical/graph/range_map.h"
#include "hierarchical/graph/ready_queue.h"

namespace simpler::graph {
namespace {

const auto kAnyEntry = [](const ReadyQueue::Entry&) { return true; };

TEST(ReadyQueue, HighPrioritiesGoFirstThenEarlySubmissions) {
  const std::vector<ReadyKey> in_order = {ready_key(INT16_MAX, 9), ready_key(1, 7),
                                          ready_key(0, 2),         ready_key(0, 3),
                                          ready_key(-1, 1),        ready_key(INT16_MIN, 0)};
  EXPECT_TRUE(std::is_sorted(in_order.begin(), in_order.end()));
  EXPECT_EQ(submission_of(in_order[0]), 9U);
  EXPECT_EQ(submission_of(in_order[4]), 1U);
}

TEST(ReadyQueue, PopsInOrderWhateverTheOrderOfPushing) {
  std::mt19937 random(7);
  ReadyQueue queue;
  std::set<ReadyKey> model;
  for (int step = 0; step < 20'000; ++step) {
    if (random() % 2 == 0 || model.empty()) {
      // Mostly ascending, as tasks become ready, with stragglers.
      const ReadyKey key =
          ready_key(0, step * 8U + 4096 - (random() % 4 == 0 ? random() % 4096 : 0));
      if (model.insert(key).second) queue.push({key, 0});
    } else {
      ASSERT_EQ(queue.front(kAnyEntry)->key, *model.begin());
      model.erase(model.begin());
      queue.pop();
    }
    ASSERT_EQ(queue.size(), model.size());
  }
}

TEST(ReadyQueue, EntriesWhoseTasksHaveGoneAreNeverSeenAndDoNotPileUp) {
  std::mt19937 random(8);
  ReadyQueue queue;
  std::set<ReadyKey> current;
  const auto is_current = [&](const ReadyQueue::Entry& entry) {
    return current.count(entry.key) != 0;
  };
  for (std::uint32_t step = 0; step < 20'000; ++step) {
    const ReadyKey key = ready_key(static_cast<std::int16_t>(random() % 3), step);
    current.insert(key);
    queue.push({key, 0});
    if (current.size() > 10) {
      current.erase(std::next(current.begin(), random() % 10));
      queue.forget_one(is_current);
    }
    ASSERT_LE(queue.size(), 2 * current.size() + 128);
    ASSERT_EQ(queue.front(is_current)->key, *current.begin());
  }
}

// Users of single bytes.
class NaiveRanges {
 public:
  std::set<std::uint32_t> touch(std::uint32_t slot, const Access& access) {
    std::set<std::uint32_t> found;
    for (std::uint64_t at = access.begin; at < access.end; ++at) {
      Byte& byte = bytes_[{access.region, at}];
      if (byte.has_writer) found.insert(byte.writer);
      if (access.mode == Mode::kRead) {
        byte.readers.insert(slot);
        continue;
      }
      found.insert(byte.readers.begin(), byte.readers.end());
      byte = {true, slot, {}};
    }
    return found;
  }
  void forget(std::uint32_t slot) {
    for (auto& [at, byte] : bytes_) {
      if (byte.has_writer && byte.writer == slot) byte.has_writer = false;
      byte.readers.erase(slot);
    }
  }

 private:
  struct Byte {
    bool has_writer = false;
    std::uint32_t writer = 0;
    std::set<std::uint32_t> readers;
  };
  std::map<std::pair<std::uint32_t, std::uint64_t>, Byte> bytes_;
};

TEST(RangeMap, TG1_AgreesWithUsersOfSingleBytes) {
  for (std::uint32_t seed = 0; seed < 30; ++seed) {
    std::mt19937 random(seed);
    RangeMap ranges(2);
    NaiveRanges model;
    std::vector<std::uint32_t> live;
    std::vector<std::uint32_t> spare;
    for (std::uint32_t slot = 0; slot < 12; ++slot) spare.push_back(slot);
    for (int step = 0; step < 1'000; ++step) {
      if (spare.empty() || (!live.empty() && random() % 3 == 0)) {
        std::swap(live[random() % live.size()], live.back());
        ranges.forget(live.back());
        model.forget(live.back());
        spare.push_back(live.back());
        live.pop_back();
        continue;
      }
      const std::uint32_t slot = spare.back();
      spare.pop_back();
      live.push_back(slot);
      for (std::uint32_t i = random() % 3; i != 0; --i) {
        const std::uint64_t begin = random() % 40;
        const Access access = {static_cast<std::uint32_t>(random() % 2),
                               random() % 2 == 0 ? Mode::kRead : Mode::kWrite, begin,
                               begin + random() % 20};
        std::vector<std::uint32_t> found;
        ranges.touch(slot, access, found);
        ASSERT_EQ(std::set(found.begin(), found.end()), model.touch(slot, access))
            << "seed " << seed << " step " << step;
      }
    }
    for (const std::uint32_t slot : live) ranges.forget(slot);
    EXPECT_EQ(ranges.interval_count(), 0U);
    EXPECT_EQ(ranges.use_count(), 0U);
  }
}

TEST(RangeMap, TheWholeAddressSpaceIsARange) {
  RangeMap ranges(1);
  std::vector<std::uint32_t> found;
  ranges.touch(0, {0, Mode::kWrite, 0, UINT64_MAX}, found);
  EXPECT_TRUE(found.empty());
  ranges.touch(1, {0, Mode::kRead, UINT64_MAX - 1, UINT64_MAX}, found);
  EXPECT_EQ(found, std::vector<std::uint32_t>{0});
}

}  // namespace
}  // namespace simpler::graph
