// Threads of ours: signals are for the threads of the program (LC-4).
#pragma once

#include <csignal>
#include <functional>
#include <string>
#include <thread>

namespace simpler {

// Blocks every signal in the calling thread for as long as it lives.
class SignalsBlocked {
 public:
  SignalsBlocked() noexcept;
  ~SignalsBlocked();
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_{};
};

// Starts a thread with every signal blocked, named for ps and top (cut to 15 bytes). Throws
// std::system_error.
std::thread start_quiet_thread(const std::string& name, std::function<void()> body);

// The calling thread, which works little and seldom, is to run soon when it is woken beside threads
// that compute: it asks for the shortest slices there are (0.1 ms, since Linux 6.12; earlier
// kernels ignore it), and whose slice is shorter preempts.
void ask_for_short_slices() noexcept;

}  // namespace simpler
