// fork, pidfds, reaping, and what a process died of.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>

#include "hierarchical/base/deadline.h"
#include "hierarchical/os/descriptor.h"

namespace simpler {

// fork() with every signal blocked in the calling thread, restored in the parent. In the child
// (returns 0) signals are still blocked: call reset_child_signals() before anything else. Throws
// Error{kSystem}.
pid_t fork_process();

[[nodiscard]] pid_t current_pid() noexcept;
// _exit: no destructor, no atexit handler, no flush.
[[noreturn]] void exit_now(int code) noexcept;
// What ps and top show, cut to 15 bytes.
void set_process_name(const std::string& name) noexcept;
// SIGKILLs and reaps a child of this process that there is no pidfd for.
void end_unwatched_child(pid_t pid) noexcept;

// In a new child: every handler to its default, SIGINT, SIGPIPE and SIGXFSZ ignored, alarms and
// interval timers off, then an empty signal mask.
void reset_child_signals() noexcept;

// Throws Error{kUnsupported} naming pidfd_open when it is missing or forbidden (ENOSYS, EPERM);
// nullopt when the process no longer exists.
std::optional<Descriptor> open_pidfd(pid_t pid);
// Throws Error{kUnsupported} with what is missing (Linux 5.10, pidfd_open, pidfd_send_signal,
// memfd_create).
void require_platform();

// True when the process behind `pidfd` has ended (all of its threads).
bool wait_process_end(int pidfd, Deadline deadline) noexcept;
// pidfd_send_signal; false when the process has already ended.
bool send_signal(int pidfd, int signal) noexcept;

struct ExitStatus {
  enum class Kind : std::uint8_t { kExited, kSignalled, kTakenByAnotherWaiter, kUnknown };
  Kind kind = Kind::kUnknown;
  int value = 0;             // exit code or signal number
  bool core_dumped = false;  // with kSignalled
  bool operator==(const ExitStatus&) const = default;
};

// How a child of this process has ended (waitid P_PIDFD); it stays to be reaped.
// kTakenByAnotherWaiter on ECHILD. REQUIRES: wait_process_end() has returned true.
ExitStatus exit_status(int pidfd) noexcept;
// How a process ends that is on its way out and has not been reaped yet, before it can be reaped;
// nullopt when it is not on its way out, or the kernel does not say how (also for exit code 0,
// which it shows to those as well who may not know).
std::optional<ExitStatus> exiting_status(int pidfd, pid_t pid) noexcept;
// The same as exit_status, and reaps it. May take long: while anyone reads /proc/PID, the kernel
// tries again and again to drop its entries there (measured: up to a second on a busy machine).
ExitStatus reap(int pidfd) noexcept;

// "exited with code 3", "killed by SIGSEGV (segmentation fault)", "killed by SIGABRT (aborted)",
// "killed by SIGKILL", "ended; exit status taken by another waiter".
std::string describe_exit(const ExitStatus& status);

// The out-of-memory kill count of this process's memory cgroup (v1 or v2), for telling an OOM kill
// from another SIGKILL. nullopt where there is none to read. Of the group at the first call.
std::optional<std::uint64_t> cgroup_oom_kills() noexcept;

// Cores this process may use: its affinity mask and the cgroup's CPU quota (v1 or v2), at least 1.
int usable_cores() noexcept;

}  // namespace simpler
