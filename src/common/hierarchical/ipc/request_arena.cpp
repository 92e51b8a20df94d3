#include "hierarchical/ipc/request_arena.h"

#include "hierarchical/ipc/bell.h"

namespace simpler {

StagedBlock::~StagedBlock() { arena_.release(offset_); }

RequestArena::RequestArena(const SharedRegion& payload, std::size_t base, std::size_t nbytes)
    : payload_(payload), base_(base), nbytes_(nbytes), allocator_(nbytes, 4096) {}

ArenaWait RequestArena::wait_stage(std::size_t nbytes, Deadline deadline, Interrupt* interrupt,
                                   std::shared_ptr<StagedBlock>& out) {
  for (;;) {
    const std::uint32_t seen = release_seen(released_);
    if (closed_.load(std::memory_order_seq_cst)) return ArenaWait::kClosed;
    {
      const std::lock_guard lock(mutex_);
      if (const auto offset = allocator_.allocate(nbytes)) {
        dirty_.store(true, std::memory_order_relaxed);
        out = std::make_shared<StagedBlock>(*this, base_ + *offset);
        return ArenaWait::kOk;
      }
    }
    const FutexResult slept = release_sleep(released_, seen, next_slice(deadline, interrupt));
    if (slept == FutexResult::kTimedOut || slept == FutexResult::kInterrupted) {
      if (interrupt != nullptr && interrupt->pending()) return ArenaWait::kInterrupted;
      if (deadline.passed()) return ArenaWait::kTimedOut;
    }
  }
}

void RequestArena::close() {
  closed_.store(true, std::memory_order_seq_cst);
  release_notify(released_);
}

void RequestArena::release(std::size_t offset) {
  bool empty = false;
  {
    const std::lock_guard lock(mutex_);
    allocator_.release(offset - base_);
    empty = allocator_.block_count() == 0;
  }
  release_notify(released_);
  if (empty && empty_) empty_();
  if (waiting_ != nullptr && waiting_->load(std::memory_order_seq_cst) > 0) bell_ring(*bell_, 1U);
}

void RequestArena::trim() {
  const std::lock_guard lock(mutex_);
  if (allocator_.block_count() != 0) return;
  dirty_.store(false, std::memory_order_relaxed);
  payload_.release_pages(base_, nbytes_);
}

}  // namespace simpler
