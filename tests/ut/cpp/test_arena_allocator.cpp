#include "hierarchical/ipc/arena_allocator.h"

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "hierarchical/base/error.h"

namespace simpler {
namespace {

// The same promises kept the slow way: one flag a unit, scanned from the start.
class NaiveArena {
 public:
  explicit NaiveArena(std::size_t units) : taken_(units, false) {}

  std::optional<std::size_t> allocate(std::size_t units) {
    std::optional<std::size_t> best;
    std::size_t best_run = 0;
    for (std::size_t start = 0; start < taken_.size();) {
      std::size_t end = start;
      while (end < taken_.size() && !taken_[end]) ++end;
      const std::size_t run = end - start;
      if (run >= units && (!best || run < best_run)) {
        best = start;
        best_run = run;
      }
      start = std::max(end, start + 1);
    }
    if (best) mark(*best, units, true);
    return best;
  }
  void mark(std::size_t start, std::size_t units, bool taken) {
    std::fill_n(taken_.begin() + static_cast<std::ptrdiff_t>(start), units, taken);
  }
  [[nodiscard]] std::size_t largest_free() const {
    std::size_t largest = 0, run = 0;
    for (const bool taken : taken_) largest = std::max(largest, run = taken ? 0 : run + 1);
    return largest;
  }

 private:
  std::vector<bool> taken_;
};

TEST(ArenaAllocator, AgreesWithANaiveModelOverRandomHistories) {
  constexpr std::size_t kUnit = 64;
  constexpr std::size_t kUnits = 200;
  for (std::uint32_t seed = 0; seed < 20; ++seed) {
    std::mt19937 random(seed);
    ArenaAllocator arena(kUnits * kUnit + 17, kUnit);
    NaiveArena model(kUnits);
    std::map<std::size_t, std::size_t> live;  // offset -> units
    std::size_t used = 0;
    for (int step = 0; step < 3'000; ++step) {
      if (random() % 5 < 3 || live.empty()) {
        const std::size_t nbytes = 1 + random() % (random() % 8 == 0 ? 60 * kUnit : 6 * kUnit);
        const std::size_t units = (nbytes + kUnit - 1) / kUnit;
        const std::optional<std::size_t> got = arena.allocate(nbytes);
        const std::optional<std::size_t> expected = model.allocate(units);
        ASSERT_EQ(got.has_value(), expected.has_value()) << "seed " << seed << ", step " << step;
        if (!got) continue;
        ASSERT_EQ(*got, *expected * kUnit) << "seed " << seed << ", step " << step;
        live[*got] = units;
        used += units;
      } else {
        const auto victim =
            std::next(live.begin(), static_cast<std::ptrdiff_t>(random() % live.size()));
        ASSERT_EQ(arena.release(victim->first), victim->second * kUnit);
        model.mark(victim->first / kUnit, victim->second, false);
        used -= victim->second;
        live.erase(victim);
      }
      ASSERT_EQ(arena.used_bytes(), used * kUnit);
      ASSERT_EQ(arena.block_count(), live.size());
      ASSERT_EQ(arena.largest_free(), model.largest_free() * kUnit);
    }
    for (const auto& [offset, units] : live) arena.release(offset);
    ASSERT_EQ(arena.largest_free(), arena.capacity());
  }
}

TEST(ArenaAllocator, OffsetsAreAlignedAndTheCapacityRoundedDown) {
  ArenaAllocator arena(1023, 256);
  EXPECT_EQ(arena.capacity(), 768U);
  EXPECT_EQ(arena.allocate(1), 0U);
  EXPECT_EQ(arena.allocate(257), 256U);
  EXPECT_EQ(arena.allocate(1), std::nullopt);
}

TEST(ArenaAllocator, ADoubleReleaseAndAStrangeOffsetAreRefused) {
  ArenaAllocator arena(4096);
  const std::size_t offset = arena.allocate(600).value();
  EXPECT_THROW(arena.release(offset + 256), Error);
  EXPECT_EQ(arena.release(offset), 768U);
  try {
    arena.release(offset);
    FAIL() << "released twice";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find("not allocated, or already freed"), std::string::npos);
  }
}

TEST(ArenaAllocator, ZeroBytesAreRefusedAndImpossibleSizesAreNotAvailable) {
  ArenaAllocator arena(4096);
  EXPECT_THROW(arena.allocate(0), Error);
  EXPECT_EQ(arena.allocate(SIZE_MAX), std::nullopt);
  EXPECT_EQ(arena.allocate(4097), std::nullopt);
  EXPECT_EQ(arena.allocate(4096), 0U);
  EXPECT_EQ(arena.largest_free(), 0U);
}

TEST(ArenaAllocator, AnEmptyArenaHasNothing) {
  ArenaAllocator arena(255, 256);
  EXPECT_EQ(arena.capacity(), 0U);
  EXPECT_EQ(arena.allocate(1), std::nullopt);
}

}  // namespace
}  // namespace simpler
