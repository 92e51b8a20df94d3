// Waits for several descriptors at once.
//
// Thread safety: one thread at a time. Borrows the descriptors: they stay open while wait() runs.
#pragma once

#include <poll.h>

#include <cstddef>
#include <vector>

#include "hierarchical/base/deadline.h"

namespace simpler {

class Poller {
 public:
  // Returns the position to ask ready() for. A negative descriptor is never ready.
  std::size_t add(int descriptor);
  // Until one can be read, has ended or is broken; false when the deadline passed first.
  bool wait(Deadline deadline) noexcept;
  // REQUIRES: wait() has returned true.
  [[nodiscard]] bool ready(std::size_t position) const noexcept {
    return polled_[position].revents != 0;
  }
  void clear() noexcept { polled_.clear(); }

 private:
  std::vector<pollfd> polled_;
};

}  // namespace simpler
