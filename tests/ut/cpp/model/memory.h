// The memory of a model: cells, store buffers, and who knows of whose past.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "hierarchical/os/futex.h"

namespace simpler::model {

inline constexpr int kMaxThreads = 6;

// clock[t]: how much of thread t's past is known to happen before.
using Clock = std::array<std::uint32_t, kMaxThreads>;

inline void join_clock(Clock& into, const Clock& from) {
  for (std::size_t i = 0; i < into.size(); ++i) {
    if (from[i] > into[i]) into[i] = from[i];
  }
}

constexpr bool acquires(std::memory_order order) {
  return order == std::memory_order_acquire || order == std::memory_order_acq_rel ||
         order == std::memory_order_seq_cst || order == std::memory_order_consume;
}

constexpr bool releases(std::memory_order order) {
  return order == std::memory_order_release || order == std::memory_order_acq_rel ||
         order == std::memory_order_seq_cst;
}

// One atomic object.
struct Cell {
  std::uint64_t value = 0;
  Clock released{};  // what an acquire load of the value learns
  const char* name = nullptr;
};

struct BufferedStore {
  Cell* cell;
  std::uint64_t value;
  Clock released;
  bool release;  // passes nothing that was buffered before it
};

// The accesses so far to plain memory.
struct GuardState {
  int writer = -1;
  std::uint32_t written_at = 0;
  Clock read_at{};
};

}  // namespace simpler::model
