// One child's control slots when the child is an enemy: it writes whatever a child may write.
#include <gtest/gtest.h>

#include <cstring>
#include <utility>

#include "hierarchical/ipc/control_protocol.h"
#include "in_process_child.h"

namespace simpler {
namespace {

using testing::InProcessChild;
using testing::make_child;
using testing::watchdog;

// No loop runs: the test is the child.
class HostileChild : public ::testing::Test {
 protected:
  InProcessChild& world = make_child(std::size_t{1} << 16);
  const PayloadSpace space = world.memory.space(0);

  ControlSlot<>& post(int& slot) {
    slot = world.post(InProcessChild::request(Lane::kMain, "hello"));
    ControlSlot<>& shared = world.child.block.slots[slot];
    EXPECT_TRUE(slot_claim(shared, Lane::kMain));
    shared.reply_id = shared.request_id;
    shared.reply_bytes = 0;
    shared.reply_offset = kInline;
    return shared;
  }
  void expect_refused_reply(int slot) {
    slot_finish(world.child.block.slots[slot]);
    expect_protocol_error(slot);
  }
  void expect_protocol_error(int slot) {
    ASSERT_EQ(world.child.control.wait_reply(slot, watchdog(), nullptr), CallWait::kOk);
    try {
      take_reply(world.child, slot);
      ADD_FAILURE() << "believed";
    } catch (const CallError& error) {
      EXPECT_EQ(error.kind, CallError::Kind::kProtocol) << error.message;
    }
    EXPECT_TRUE(world.child.control.all_released());
  }
};

TEST_F(HostileChild, AReplysLengthBeyondItsSlotIsRefused) {
  for (const std::uint64_t nbytes :
       {std::uint64_t{kSlotInlineBytes + 1}, std::uint64_t{1} << 32, ~std::uint64_t{0}}) {
    int slot = -1;
    post(slot).reply_bytes = nbytes;
    expect_refused_reply(slot);
  }
}

TEST_F(HostileChild, AReplysPlaceOutsideItsHalfIsRefused) {
  const std::pair<std::uint64_t, std::uint64_t> places[] = {
      {space.request_base, 16},
      {space.reply_base - 1, 1},
      {space.reply_base, space.reply_bytes + 1},
      {space.reply_base + space.reply_bytes, 1},
      {space.reply_base + 4096, ~std::uint64_t{0} - 4096},
      {~std::uint64_t{0} - 1, 4},
      {std::uint64_t{1} << 63, std::uint64_t{1} << 63}};
  for (const auto& [offset, nbytes] : places) {
    int slot = -1;
    ControlSlot<>& shared = post(slot);
    shared.reply_offset = offset;
    shared.reply_bytes = nbytes;
    expect_refused_reply(slot);
  }
}

TEST_F(HostileChild, CP1_AReplyWithAnotherRequestsIdIsRefused) {
  int slot = -1;
  post(slot).reply_id += 1;
  expect_refused_reply(slot);
}

TEST_F(HostileChild, AnUnknownReplyStatusIsRefused) {
  int slot = -1;
  post(slot).status = 77;
  expect_refused_reply(slot);
}

TEST_F(HostileChild, AFailureThatDoesNotDecodeIsRefused) {
  int slot = -1;
  ControlSlot<>& shared = post(slot);
  shared.status = static_cast<std::uint32_t>(ReplyStatus::kFailure);
  shared.reply_bytes = 64;
  std::memset(shared.bytes, 0xff, 64);
  expect_refused_reply(slot);
}

TEST_F(HostileChild, ScribblingOverTheRequestChangesNothingTheParentBelieves) {
  int slot = -1;
  ControlSlot<>& shared = post(slot);
  shared.op = 999;
  shared.arg = 999;
  std::array<InFlight, kControlSlots> out;
  ASSERT_EQ(world.child.control.running(out), 1);
  EXPECT_EQ(out[0].op, ControlOp::EXTENSION);
  EXPECT_EQ(out[0].arg, 0U);
  slot_finish(shared);
  EXPECT_EQ(world.finish(slot), "");
}

TEST_F(HostileChild, ASlotThatClaimsToBeLateIsNotTakenFromItsCaller) {
  int abandoned = -1;
  post(abandoned);
  EXPECT_EQ(world.child.control.leave(abandoned, false), CallWait::kTimedOutStarted);
  int held = -1;
  ControlSlot<>& shared = post(held);
  shared.state.store(raw(SlotState::kLate));
  int ended = 0;
  world.child.control.reclaim_abandoned([&](std::uint64_t) { ++ended; });
  EXPECT_EQ(ended, 0);
  EXPECT_NE(world.child.control.poll_slot(), held) << "two callers own one slot";
}

TEST_F(HostileChild, ASlotInNoKnownStateIsAProtocolErrorAndComesBack) {
  for (const std::uint32_t state : {4711U, raw(SlotState::kIdle), raw(SlotState::kLate)}) {
    int slot = -1;
    post(slot).state.store(state);
    expect_protocol_error(slot);
  }
}

}  // namespace
}  // namespace simpler
