#include "hierarchical/os/fork_epoch.h"

#include <pthread.h>

#include <atomic>

namespace simpler {

namespace {

std::atomic<std::uint32_t> epoch{0};

// Registered when the library is loaded, so before anything that could ask.
const int kRegistered =
    pthread_atfork(nullptr, nullptr, [] { epoch.fetch_add(1, std::memory_order_relaxed); });

}  // namespace

std::uint32_t fork_epoch() noexcept {
  static_cast<void>(kRegistered);
  return epoch.load(std::memory_order_relaxed);
}

}  // namespace simpler
