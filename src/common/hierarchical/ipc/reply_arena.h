// The child's half of its payload space: replies and results that are too large for a slot.
//
// Nothing tells the child that the parent has read a reply but the slot itself, so blocks are swept
// when space is needed: a block is free once its slot has moved on.
//
// Thread safety: all methods may be called from any thread of the child.
// Fork: constructed in the child.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "hierarchical/base/deadline.h"
#include "hierarchical/ipc/arena_allocator.h"
#include "hierarchical/ipc/layout.h"
#include "hierarchical/ipc/payload_space.h"
#include "hierarchical/os/shared_region.h"

namespace simpler {

// Who reads a block: a control slot's caller, or the waiter of a task.
struct ReplyOwner {
  int slot = -1;         // -1: a task
  std::uint64_t id = 0;  // request id or task sequence
};

class ReplyArena {
 public:
  ReplyArena(const SharedRegion& payload, PayloadSpace space, ChildBlock<>& block);

  [[nodiscard]] std::size_t capacity() const noexcept { return space_.reply_bytes; }
  [[nodiscard]] std::byte* at(std::size_t offset) const noexcept {
    return payload_.data() + offset;
  }

  // An offset in the payload region, waiting for the parent to read older replies; nullopt at the
  // deadline.
  std::optional<std::size_t> wait_allocate(std::size_t nbytes, ReplyOwner owner, Deadline deadline);

  // True when pages were used since the last trim; trim() gives them back unless a reply is unread.
  [[nodiscard]] bool wants_trim() const noexcept { return dirty_.load(std::memory_order_relaxed); }
  void trim();

 private:
  struct Block {
    std::size_t offset;
    ReplyOwner owner;
  };
  void sweep();
  [[nodiscard]] bool has_been_read(const ReplyOwner& owner) const;

  const SharedRegion& payload_;
  const PayloadSpace space_;
  ChildBlock<>& block_;
  std::mutex mutex_;
  ArenaAllocator allocator_;   // guarded by mutex_
  std::vector<Block> blocks_;  // guarded by mutex_
  std::atomic<bool> dirty_{false};
};

}  // namespace simpler
