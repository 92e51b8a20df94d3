// What the parent knows of one child: its place in shared memory, its channel, its process.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "hierarchical/ipc/control_parent.h"
#include "hierarchical/ipc/task_ring_parent.h"
#include "hierarchical/os/life_mark.h"
#include "hierarchical/os/process.h"
#include "hierarchical/os/shared_region.h"

namespace simpler {

enum class ChildState : std::uint8_t { kStarting, kReady, kDead, kClosed };

// The shared memory of one tree. Mapped before the fork, at one address in all of its processes.
class TreeMemory {
 public:
  TreeMemory(int children, std::size_t max_payload, std::size_t heap_bytes,
             const std::string& name);

  [[nodiscard]] TreeHeader<>& header() const noexcept { return *header_; }
  [[nodiscard]] ChildBlock<>& block(int index) const noexcept;
  [[nodiscard]] LifeMark& life(int index) const noexcept;
  [[nodiscard]] PayloadSpace space(int index) const noexcept;
  [[nodiscard]] const SharedRegion& control() const noexcept { return control_; }
  [[nodiscard]] const SharedRegion& payload() const noexcept { return payload_; }
  [[nodiscard]] const std::shared_ptr<SharedRegion>& heap() const noexcept { return heap_; }

 private:
  std::size_t half_bytes_;  // of one child's payload space; errors of kMaxFailureBytes always fit
  SharedRegion control_;
  SharedRegion payload_;
  std::shared_ptr<SharedRegion> heap_;
  TreeHeader<>* header_;
  std::byte* lives_;  // a LifeMark per child, after their blocks
};

struct ChildProcess {
  ChildProcess(TreeMemory& memory, int child_index, bool chip, int device, Nanoseconds spin_bound);

  // "chip 3 (device 5, pid 812)", "sub worker 4 (pid 813)"
  [[nodiscard]] std::string describe() const;

  const int index;
  const bool is_chip;
  const int device_id;       // -1 in a sub worker
  const std::uint64_t seat;  // this child's bit of TreeHeader::spinners, or 0
  ChildBlock<>& block;
  LifeMark& life;
  RequestArena arena;
  ControlParentEnd control;
  TaskRingParentEnd ring;
  std::atomic<std::uint64_t> generation{0};
  std::atomic<pid_t> pid{-1};

  // Guarded by WorkerManager's mutex.
  Descriptor pidfd;
  ChildState state = ChildState::kStarting;
  // CP-4: what every later use of this child repeats. Stays over a restart, for callers of the dead
  // child that ask only then.
  std::string first_cause;
  bool is_settled = true;  // false from kDead until its callers are woken and it is reaped
};

}  // namespace simpler
