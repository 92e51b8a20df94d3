#include "hierarchical/ipc/request_arena.h"

#include <gtest/gtest.h>

#include <array>
#include <thread>
#include <vector>

#include "in_process_child.h"

namespace simpler {
namespace {

using testing::FakeInterrupt;
using testing::watchdog;

constexpr std::size_t kPage = 4096;
constexpr std::size_t kBase = 4 * kPage;
constexpr std::size_t kBytes = 8 * kPage;

class RequestArenaTest : public ::testing::Test {
 protected:
  SharedRegion region{kBase + kBytes, "arena", SharedRegion::Pages::kSparse};
  RequestArena arena{region, kBase, kBytes};

  std::shared_ptr<StagedBlock> stage(std::size_t nbytes) {
    std::shared_ptr<StagedBlock> block;
    EXPECT_EQ(arena.wait_stage(nbytes, watchdog(), nullptr, block), ArenaWait::kOk);
    return block;
  }
};

TEST_F(RequestArenaTest, BlocksLieInItsOwnPartAndDoNotOverlap) {
  const auto first = stage(kPage + 1);
  const auto second = stage(6 * kPage);
  EXPECT_GE(first->offset(), kBase);
  EXPECT_GE(second->offset(), first->offset() + kPage + 1);
  EXPECT_LE(second->offset() + 6 * kPage, kBase + kBytes);
  EXPECT_EQ(arena.at(first->offset()), region.data() + first->offset());
}

TEST_F(RequestArenaTest, CP9_AFullArenaWaitsUntilTheLastOwnerOfABlockLetsGo) {
  auto block = stage(kBytes);
  auto shared = block;
  std::shared_ptr<StagedBlock> next;
  EXPECT_EQ(arena.wait_stage(1, Deadline::at(0), nullptr, next), ArenaWait::kTimedOut);
  std::thread waiter([&] { next = stage(kBytes); });
  block.reset();
  EXPECT_EQ(arena.wait_stage(1, Deadline::at(0), nullptr, block), ArenaWait::kTimedOut)
      << "somebody still reads it";
  shared.reset();
  waiter.join();
  EXPECT_EQ(next->offset(), kBase);
}

TEST_F(RequestArenaTest, ASignalEndsTheWait) {
  const auto block = stage(kBytes);
  FakeInterrupt interrupt;
  interrupt.interrupt();
  std::shared_ptr<StagedBlock> next;
  EXPECT_EQ(arena.wait_stage(1, Deadline::never(), &interrupt, next), ArenaWait::kInterrupted);
}

TEST_F(RequestArenaTest, CP3_ClosingFailsWaitersNowAndLaterUntilReopened) {
  const auto block = stage(kBytes);
  std::thread waiter([&] {
    std::shared_ptr<StagedBlock> next;
    EXPECT_EQ(arena.wait_stage(1, Deadline::never(), nullptr, next), ArenaWait::kClosed);
  });
  arena.close();
  waiter.join();
  std::shared_ptr<StagedBlock> next;
  EXPECT_EQ(arena.wait_stage(1, Deadline::never(), nullptr, next), ArenaWait::kClosed);
  arena.reopen();
  EXPECT_EQ(arena.wait_stage(1, Deadline::at(0), nullptr, next), ArenaWait::kTimedOut);
}

TEST_F(RequestArenaTest, LC7_TrimGivesPagesBackButNeverThoseOfALiveBlock) {
  EXPECT_FALSE(arena.wants_trim());
  auto block = stage(3 * kPage);
  std::memset(arena.at(block->offset()), 7, 3 * kPage);
  region.data()[0] = std::byte{1};  // another child's part
  EXPECT_TRUE(arena.wants_trim());
  arena.trim();
  EXPECT_EQ(region.resident_bytes(), 4 * kPage);
  EXPECT_EQ(arena.at(block->offset())[0], std::byte{7});
  EXPECT_TRUE(arena.wants_trim()) << "not given back yet";
  block.reset();
  arena.trim();
  EXPECT_EQ(region.resident_bytes(), kPage);
  EXPECT_EQ(region.data()[0], std::byte{1});
  EXPECT_FALSE(arena.wants_trim());
}

TEST_F(RequestArenaTest, ThreadsThatOvercommitTheArenaAllGetTheirTurn) {
  std::array<std::atomic<bool>, kBytes / kPage> taken{};
  std::atomic<int> overlaps{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 6; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < 100; ++round) {
        const auto block = stage(3 * kPage);
        const std::size_t page = (block->offset() - kBase) / kPage;
        for (std::size_t j = page; j < page + 3; ++j) {
          if (taken.at(j).exchange(true)) overlaps.fetch_add(1);
        }
        for (std::size_t j = page; j < page + 3; ++j) taken.at(j).store(false);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(overlaps.load(), 0);
}

}  // namespace
}  // namespace simpler
