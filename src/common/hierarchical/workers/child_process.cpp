#include "hierarchical/workers/child_process.h"

#include <algorithm>
#include <limits>
#include <new>

#include "hierarchical/base/error.h"
#include "hierarchical/ipc/error_codec.h"
#include "hierarchical/ipc/spin.h"

namespace simpler {

namespace {

constexpr std::size_t kPage = 4096;

// Half of one child's payload space.
std::size_t half_of(std::size_t max_payload, int children) {
  const auto halves = 2 * static_cast<std::size_t>(std::max(1, children));
  const std::size_t extra = kPage + 2 * kMaxFailureBytes;
  const auto most = static_cast<std::size_t>(std::numeric_limits<std::ptrdiff_t>::max()) / halves;
  if (max_payload > most - extra) {
    throw Error(ErrorCode::kInvalidArgument, "max_control_payload of " +
                                                 std::to_string(max_payload) +
                                                 " bytes is more than this machine can address");
  }
  return (max_payload + kPage - 1) / kPage * kPage + 2 * kMaxFailureBytes;
}

}  // namespace

TreeMemory::TreeMemory(int children, std::size_t max_payload, std::size_t heap_bytes,
                       const std::string& name)
    : half_bytes_(half_of(max_payload, children)),
      control_(sizeof(TreeHeader<>) +
                   static_cast<std::size_t>(children) * (sizeof(ChildBlock<>) + sizeof(LifeMark)),
               name + "-control", SharedRegion::Pages::kCommitted),
      payload_(std::max(1UL, static_cast<std::size_t>(children)) * 2 * half_bytes_,
               name + "-payload", SharedRegion::Pages::kSparse),
      heap_(
          std::make_shared<SharedRegion>(heap_bytes, name + "-heap", SharedRegion::Pages::kSparse)),
      header_(new (control_.data()) TreeHeader<>),
      lives_(control_.data() + sizeof(TreeHeader<>) +
             static_cast<std::size_t>(children) * sizeof(ChildBlock<>)) {
  for (int i = 0; i < children; ++i) {
    new (control_.data() + sizeof(TreeHeader<>) +
         static_cast<std::size_t>(i) * sizeof(ChildBlock<>)) ChildBlock<>;
    new (lives_ + static_cast<std::size_t>(i) * sizeof(LifeMark)) LifeMark;
  }
}

ChildBlock<>& TreeMemory::block(int index) const noexcept {
  std::byte* at = control_.data() + sizeof(TreeHeader<>) +
                  static_cast<std::size_t>(index) * sizeof(ChildBlock<>);
  return *std::launder(reinterpret_cast<ChildBlock<>*>(at));
}

LifeMark& TreeMemory::life(int index) const noexcept {
  std::byte* at = lives_ + static_cast<std::size_t>(index) * sizeof(LifeMark);
  return *std::launder(reinterpret_cast<LifeMark*>(at));
}

PayloadSpace TreeMemory::space(int index) const noexcept {
  const std::size_t base = static_cast<std::size_t>(index) * 2 * half_bytes_;
  return {base, half_bytes_, base + half_bytes_, half_bytes_};
}

ChildProcess::ChildProcess(TreeMemory& memory, int child_index, bool chip, int device,
                           Nanoseconds spin_bound)
    : index(child_index),
      is_chip(chip),
      device_id(device),
      seat(child_index < kChildSeats ? std::uint64_t{1} << child_index : 0),
      block(memory.block(child_index)),
      life(memory.life(child_index)),
      arena(memory.payload(), memory.space(child_index).request_base,
            memory.space(child_index).request_bytes),
      control(memory.header(), block, memory.payload(), memory.space(child_index), arena,
              spin_bound),
      ring(memory.header(), block, memory.payload(), memory.space(child_index), arena, spin_bound) {
  // A block may be let go of by another child's slot, or with a task.
  arena.ring_on_release(memory.header().async_bell, control.async_waiting());
}

std::string ChildProcess::describe() const {
  std::string text = is_chip ? "chip " : "sub worker ";
  text += std::to_string(index) + " (";
  if (is_chip) text += "device " + std::to_string(device_id) + ", ";
  return text + "pid " + std::to_string(pid) + ")";
}

}  // namespace simpler
