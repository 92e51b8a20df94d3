// The parent's half of a child's payload space: requests that are too large for a slot.
//
// Thread safety: all methods may be called from any thread of the parent.
// Ownership: borrows the region; blocks must not outlive the arena.
// Fork: construct before the fork; the child must not touch its copy.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>

#include "hierarchical/base/interrupt.h"
#include "hierarchical/ipc/arena_allocator.h"
#include "hierarchical/ipc/layout.h"
#include "hierarchical/os/shared_region.h"

namespace simpler {

class RequestArena;

// One staged request. Shared by all slots that name it; the space comes back with the last of them.
class StagedBlock {
 public:
  StagedBlock(RequestArena& arena, std::size_t offset) noexcept : arena_(arena), offset_(offset) {}
  ~StagedBlock();
  StagedBlock(const StagedBlock&) = delete;
  StagedBlock& operator=(const StagedBlock&) = delete;

  [[nodiscard]] std::size_t offset() const noexcept {
    return offset_;
  }  // from the payload region's start

 private:
  RequestArena& arena_;
  std::size_t offset_;
};

enum class ArenaWait : std::uint8_t { kOk, kTimedOut, kInterrupted, kClosed };

class RequestArena {
 public:
  RequestArena(const SharedRegion& payload, std::size_t base, std::size_t nbytes);

  // A block of `nbytes`, waiting for space until the deadline or close(). REQUIRES: nbytes <=
  // capacity.
  ArenaWait wait_stage(std::size_t nbytes, Deadline deadline, Interrupt* interrupt,
                       std::shared_ptr<StagedBlock>& out);
  // Rings `bell` at each release while `waiting` is positive: somebody queues for space without a
  // thread that waits.
  void ring_on_release(Bell<>& bell, const std::atomic<int>& waiting) {
    bell_ = &bell;
    waiting_ = &waiting;
  }
  // Calls `empty` whenever the last block has been released: the time to think of trim().
  // REQUIRES: nobody releases a block meanwhile.
  void when_empty(std::function<void()> empty) { empty_ = std::move(empty); }
  // Fails every waiter, now and later.
  void close();
  void reopen() { closed_.store(false, std::memory_order_seq_cst); }

  [[nodiscard]] std::size_t capacity() const noexcept { return nbytes_; }
  [[nodiscard]] std::byte* at(std::size_t offset) const noexcept {
    return payload_.data() + offset;
  }

  // True when pages were used since the last trim; trim() gives them back unless a block is live.
  [[nodiscard]] bool wants_trim() const noexcept { return dirty_.load(std::memory_order_relaxed); }
  void trim();

 private:
  friend class StagedBlock;
  void release(std::size_t offset);

  const SharedRegion& payload_;
  const std::size_t base_;
  const std::size_t nbytes_;
  std::mutex mutex_;
  ArenaAllocator allocator_;  // guarded by mutex_
  ReleaseEvent<> released_;   // private to the parent
  Bell<>* bell_ = nullptr;
  const std::atomic<int>* waiting_ = nullptr;
  std::function<void()> empty_;
  std::atomic<bool> dirty_{false};
  std::atomic<bool> closed_{false};
};

}  // namespace simpler
