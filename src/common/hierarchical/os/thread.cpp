#include "hierarchical/os/thread.h"

#include <pthread.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <utility>

namespace simpler {

namespace {

struct SchedulingAttributes {  // sched_attr of sched_setattr(2), in its first version
  std::uint32_t size = sizeof(SchedulingAttributes);
  std::uint32_t policy = SCHED_OTHER;
  std::uint64_t flags = 0;
  std::int32_t nice = 0;
  std::uint32_t priority = 0;
  std::uint64_t runtime_ns = 0;
  std::uint64_t deadline_ns = 0;
  std::uint64_t period_ns = 0;
};
static_assert(sizeof(SchedulingAttributes) == 48);

}  // namespace

SignalsBlocked::SignalsBlocked() noexcept {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before_);
}

SignalsBlocked::~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

std::thread start_quiet_thread(const std::string& name, std::function<void()> body) {
  const SignalsBlocked blocked;  // which the new thread inherits
  std::thread thread(std::move(body));
  pthread_setname_np(thread.native_handle(), name.substr(0, 15).c_str());
  return thread;
}

void ask_for_short_slices() noexcept {
  if (sched_getscheduler(0) != SCHED_OTHER) return;  // the user chose another: it stays
  errno = 0;
  SchedulingAttributes wanted;
  wanted.nice = getpriority(PRIO_PROCESS, 0);
  wanted.runtime_ns = 100'000;
  if (errno == 0) syscall(SYS_sched_setattr, 0, &wanted, 0U);
}

}  // namespace simpler
