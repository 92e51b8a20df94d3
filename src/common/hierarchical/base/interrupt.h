// How a blocked call looks for signals: implemented by the language binding, given by the main
// thread only.
#pragma once

#include "hierarchical/base/deadline.h"

namespace simpler {

class Interrupt {
 public:
  virtual ~Interrupt() = default;
  // True when the blocked call must end now. Called after EINTR and every kSignalCheckNs (CP-11).
  virtual bool pending() = 0;
};

inline constexpr Nanoseconds kSignalCheckNs = 100'000'000;

// The end of the next sleep: `deadline`, or sooner when signals must be looked for.
inline Deadline next_slice(Deadline deadline, const Interrupt* interrupt) noexcept {
  if (interrupt == nullptr) return deadline;
  return deadline.earlier(Deadline::at(monotonic_now() + kSignalCheckNs));
}

}  // namespace simpler
