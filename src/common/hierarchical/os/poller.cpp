#include "hierarchical/os/poller.h"

#include <cerrno>
#include <ctime>

namespace simpler {

std::size_t Poller::add(int descriptor) {
  polled_.push_back({descriptor, POLLIN, 0});
  return polled_.size() - 1;
}

bool Poller::wait(Deadline deadline) noexcept {
  constexpr Nanoseconds kNanosecondsPerSecond = 1'000'000'000;
  for (;;) {
    const Nanoseconds left = deadline.remaining_ns();
    const timespec timeout{static_cast<time_t>(left / kNanosecondsPerSecond),
                           static_cast<long>(left % kNanosecondsPerSecond)};
    const int count =
        ppoll(polled_.data(), polled_.size(), deadline.is_never() ? nullptr : &timeout, nullptr);
    if (count > 0) return true;
    if (count == 0 && deadline.passed()) return false;
    if (count < 0 && errno != EINTR) return false;
  }
}

}  // namespace simpler
