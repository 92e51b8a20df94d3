#include "hierarchical/os/life_mark.h"

#include <linux/futex.h>

#include <new>

namespace simpler {

void LifeMark::reset() noexcept {
  pthread_mutexattr_t kind;
  pthread_mutexattr_init(&kind);
  pthread_mutexattr_setrobust(&kind, PTHREAD_MUTEX_ROBUST);
  pthread_mutexattr_setpshared(&kind, PTHREAD_PROCESS_SHARED);
  pthread_mutex_init(&mutex_, &kind);
  pthread_mutexattr_destroy(&kind);
}

const std::atomic<std::uint32_t>& LifeMark::word() const noexcept {
#ifdef __GLIBC__
  static_assert(sizeof mutex_.__data.__lock == sizeof(std::atomic<std::uint32_t>));
  return *std::launder(reinterpret_cast<const std::atomic<std::uint32_t>*>(&mutex_.__data.__lock));
#else
  static const std::atomic<std::uint32_t> unheld{0};
  return unheld;
#endif
}

void LifeMark::hold() noexcept {
#ifdef __GLIBC__
  [[maybe_unused]] const int failure = pthread_mutex_trylock(&mutex_);  // then the pidfd tells
#endif
}

std::optional<std::uint32_t> LifeMark::arm(pid_t holder) noexcept {
  std::uint32_t held = word().load(std::memory_order_seq_cst);
  if (held & FUTEX_OWNER_DIED || (held & FUTEX_TID_MASK) != static_cast<std::uint32_t>(holder))
    return std::nullopt;
  const std::uint32_t armed = held | FUTEX_WAITERS;
  // Once: who changes the word meanwhile ends, or is not to be believed.
  auto& shared = const_cast<std::atomic<std::uint32_t>&>(word());
  if (!shared.compare_exchange_strong(held, armed, std::memory_order_seq_cst)) return std::nullopt;
  return armed;
}

bool LifeMark::says_ended() const noexcept {
  return (word().load(std::memory_order_seq_cst) & FUTEX_OWNER_DIED) != 0;
}

}  // namespace simpler
