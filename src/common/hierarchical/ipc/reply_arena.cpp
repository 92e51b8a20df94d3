#include "hierarchical/ipc/reply_arena.h"

#include "hierarchical/ipc/control_protocol.h"

namespace simpler {

ReplyArena::ReplyArena(const SharedRegion& payload, PayloadSpace space, ChildBlock<>& block)
    : payload_(payload), space_(space), block_(block), allocator_(space.reply_bytes, 4096) {}

bool ReplyArena::has_been_read(const ReplyOwner& owner) const {
  if (owner.slot < 0) return block_.ring.retired.load(std::memory_order_acquire) >= owner.id;
  const ControlSlot<>& slot = block_.slots[owner.slot];
  const std::uint32_t state = slot.state.load(std::memory_order_acquire);
  return state == raw(SlotState::kIdle) || state == raw(SlotState::kLate) ||
         slot.request_id.load(std::memory_order_relaxed) != owner.id;
}

void ReplyArena::sweep() {
  std::erase_if(blocks_, [this](const Block& block) {
    if (!has_been_read(block.owner)) return false;
    allocator_.release(block.offset - space_.reply_base);
    return true;
  });
}

std::optional<std::size_t> ReplyArena::wait_allocate(std::size_t nbytes, ReplyOwner owner,
                                                     Deadline deadline) {
  for (;;) {
    const std::uint32_t seen = release_seen(block_.replies_released);
    {
      const std::lock_guard lock(mutex_);
      sweep();
      if (const auto offset = allocator_.allocate(nbytes)) {
        dirty_.store(true, std::memory_order_relaxed);
        blocks_.push_back({space_.reply_base + *offset, owner});
        return space_.reply_base + *offset;
      }
    }
    if (release_sleep(block_.replies_released, seen, deadline) == FutexResult::kTimedOut)
      return std::nullopt;
  }
}

void ReplyArena::trim() {
  const std::lock_guard lock(mutex_);
  sweep();
  if (!blocks_.empty()) return;
  dirty_.store(false, std::memory_order_relaxed);
  payload_.release_pages(space_.reply_base, space_.reply_bytes);
}

}  // namespace simpler
