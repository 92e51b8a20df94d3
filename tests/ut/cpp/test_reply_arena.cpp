#include "hierarchical/ipc/reply_arena.h"

#include <gtest/gtest.h>

#include <thread>

#include "hierarchical/ipc/control_protocol.h"
#include "in_process_child.h"

namespace simpler {
namespace {

using testing::watchdog;

constexpr std::size_t kPage = 4096;

class ReplyArenaTest : public ::testing::Test {
 protected:
  SharedRegion region{16 * kPage, "arena", SharedRegion::Pages::kSparse};
  const PayloadSpace space{0, 8 * kPage, 8 * kPage, 8 * kPage};
  std::unique_ptr<ChildBlock<>> block = std::make_unique<ChildBlock<>>();
  ReplyArena arena{region, space, *block};

  // A slot whose reply nobody has read yet.
  ReplyOwner unread(int slot, std::uint64_t id) {
    block->slots[slot].request_id = id;
    block->slots[slot].state.store(raw(SlotState::kReplied));
    return {slot, id};
  }
  void read(int slot) {
    block->slots[slot].state.store(raw(SlotState::kIdle));
    release_notify(block->replies_released);
  }
  std::optional<std::size_t> poll_allocate(std::size_t nbytes, ReplyOwner owner) {
    return arena.wait_allocate(nbytes, owner, Deadline::at(0));
  }
};

TEST_F(ReplyArenaTest, BlocksLieInTheReplyHalf) {
  const auto offset = poll_allocate(2 * kPage, unread(0, 1));
  ASSERT_TRUE(offset);
  EXPECT_TRUE(space.reply_contains(*offset, 2 * kPage));
  EXPECT_EQ(arena.at(*offset), region.data() + *offset);
}

TEST_F(ReplyArenaTest, CP9_ABlockIsFreeOnceItsReplyWasRead) {
  ASSERT_TRUE(poll_allocate(8 * kPage, unread(0, 1)));
  EXPECT_FALSE(poll_allocate(1, unread(1, 2)));
  std::thread waiter(
      [&] { EXPECT_TRUE(arena.wait_allocate(8 * kPage, unread(1, 2), watchdog())); });
  read(0);
  waiter.join();
}

TEST_F(ReplyArenaTest, CP1_ABlockOfALateReplyIsFree) {
  ASSERT_TRUE(poll_allocate(8 * kPage, unread(0, 1)));
  block->slots[0].state.store(raw(SlotState::kAbandoned));
  EXPECT_FALSE(poll_allocate(1, unread(1, 2))) << "its handler still writes";
  block->slots[0].state.store(raw(SlotState::kLate));
  EXPECT_TRUE(poll_allocate(8 * kPage, unread(1, 2)));
}

TEST_F(ReplyArenaTest, ABlockIsFreeOnceItsSlotServesAnotherRequest) {
  ASSERT_TRUE(poll_allocate(8 * kPage, unread(0, 1)));
  unread(0, 2);
  EXPECT_TRUE(poll_allocate(8 * kPage, ReplyOwner{0, 2}));
}

TEST_F(ReplyArenaTest, AResultIsFreeOnceItsTaskIsRetired) {
  ASSERT_TRUE(poll_allocate(8 * kPage, ReplyOwner{-1, 5}));
  block->ring.retired.store(4);
  EXPECT_FALSE(poll_allocate(1, ReplyOwner{-1, 6}));
  block->ring.retired.store(5);
  EXPECT_TRUE(poll_allocate(1, ReplyOwner{-1, 6}));
}

TEST_F(ReplyArenaTest, LC7_TrimGivesPagesBackButNeverAnUnreadReply) {
  EXPECT_FALSE(arena.wants_trim());
  const auto offset = poll_allocate(3 * kPage, unread(0, 1));
  ASSERT_TRUE(offset);
  std::memset(arena.at(*offset), 7, 3 * kPage);
  region.data()[0] = std::byte{1};  // a request
  EXPECT_TRUE(arena.wants_trim());
  arena.trim();
  EXPECT_EQ(arena.at(*offset)[0], std::byte{7});
  read(0);
  arena.trim();
  EXPECT_EQ(region.resident_bytes(), kPage);
  EXPECT_EQ(region.data()[0], std::byte{1});
  EXPECT_FALSE(arena.wants_trim());
}

}  // namespace
}  // namespace simpler
