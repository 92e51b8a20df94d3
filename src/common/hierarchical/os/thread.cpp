#include "hierarchical/os/thread.h"

#include <pthread.h>

#include <utility>

namespace simpler {

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

}  // namespace simpler
