#include "hierarchical/os/process.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <system_error>
#include <utility>

#include "hierarchical/base/error.h"
#include "hierarchical/os/cgroup.h"

#ifndef SYS_pidfd_send_signal
#define SYS_pidfd_send_signal 424
#endif
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

namespace simpler {
namespace {

constexpr Nanoseconds kNanosecondsPerSecond = 1'000'000'000;
constexpr auto kWaitByPidfd =
    static_cast<idtype_t>(3);  // P_PIDFD, which C libraries older than the kernel lack

int pidfd_open_raw(pid_t pid) noexcept {
  return static_cast<int>(syscall(SYS_pidfd_open, pid, 0U));
}

int pidfd_send_signal_raw(int pidfd, int signal) noexcept {
  return static_cast<int>(syscall(SYS_pidfd_send_signal, pidfd, signal, nullptr, 0U));
}

// Major and minor of "6.1.0-13-amd64"; zeros for what is no version.
std::pair<int, int> kernel_version(const std::string& release) noexcept {
  std::pair<int, int> version;
  const char* const end = release.c_str() + release.size();
  const auto major = std::from_chars(release.c_str(), end, version.first);
  if (major.ec != std::errc{} || major.ptr == end || *major.ptr != '.') return {0, 0};
  std::from_chars(major.ptr + 1, end, version.second);
  return version;
}

std::string with_errno(const char* call) {
  const int code = errno;
  return std::string(call) + " (" + std::generic_category().message(code) + ")";
}

struct SignalName {
  int number;
  const char* name;
  const char* meaning;
};

constexpr SignalName kSignalNames[] = {
    {SIGHUP, "SIGHUP", "hangup"},
    {SIGINT, "SIGINT", "interrupt"},
    {SIGQUIT, "SIGQUIT", "quit"},
    {SIGILL, "SIGILL", "illegal instruction"},
    {SIGTRAP, "SIGTRAP", "trace or breakpoint trap"},
    {SIGABRT, "SIGABRT", "aborted"},
    {SIGBUS, "SIGBUS", "bus error"},
    {SIGFPE, "SIGFPE", "arithmetic error"},
    {SIGKILL, "SIGKILL", ""},
    {SIGUSR1, "SIGUSR1", ""},
    {SIGSEGV, "SIGSEGV", "segmentation fault"},
    {SIGUSR2, "SIGUSR2", ""},
    {SIGPIPE, "SIGPIPE", "broken pipe"},
    {SIGALRM, "SIGALRM", "alarm clock"},
    {SIGTERM, "SIGTERM", "terminated"},
    {SIGSTKFLT, "SIGSTKFLT", "stack fault"},
    {SIGXCPU, "SIGXCPU", "CPU time limit exceeded"},
    {SIGXFSZ, "SIGXFSZ", "file size limit exceeded"},
    {SIGVTALRM, "SIGVTALRM", "virtual timer expired"},
    {SIGPROF, "SIGPROF", "profiling timer expired"},
    {SIGIO, "SIGIO", "I/O possible"},
    {SIGPWR, "SIGPWR", "power failure"},
    {SIGSYS, "SIGSYS", "bad system call"},
};

std::string describe_signal(int signal) {
  for (const SignalName& known : kSignalNames) {
    if (known.number != signal) continue;
    const std::string meaning = known.meaning;
    return meaning.empty() ? known.name : known.name + (" (" + meaning + ")");
  }
  if (signal >= SIGRTMIN && signal <= SIGRTMAX) {
    return signal == SIGRTMIN ? "SIGRTMIN" : "SIGRTMIN+" + std::to_string(signal - SIGRTMIN);
  }
  return "signal " + std::to_string(signal);
}

std::optional<int> affinity_cores() {
  for (std::size_t cpus = 1024; cpus <= (std::size_t{1} << 20); cpus *= 2) {
    const std::unique_ptr<cpu_set_t, void (*)(cpu_set_t*)> set(CPU_ALLOC(cpus),
                                                               [](cpu_set_t* p) { CPU_FREE(p); });
    if (set == nullptr) return std::nullopt;
    const std::size_t nbytes = CPU_ALLOC_SIZE(cpus);
    if (sched_getaffinity(0, nbytes, set.get()) == 0) return CPU_COUNT_S(nbytes, set.get());
    if (errno != EINVAL) return std::nullopt;  // EINVAL: the kernel's mask is longer
  }
  return std::nullopt;
}

}  // namespace

pid_t fork_process() {
  sigset_t all, before;
  sigfillset(&all);
  const int blocked = pthread_sigmask(SIG_SETMASK, &all, &before);
  if (blocked != 0) {
    errno = blocked;
    throw_errno("pthread_sigmask");
  }
  const pid_t pid = fork();
  if (pid == 0) return 0;
  const int saved = errno;
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  errno = saved;
  if (pid < 0) throw_errno("fork");
  return pid;
}

void reset_child_signals() noexcept {
  struct sigaction action{};
  sigemptyset(&action.sa_mask);
  for (int signal = 1; signal < NSIG; ++signal) {
    const bool ignored = signal == SIGINT || signal == SIGPIPE || signal == SIGXFSZ;
    action.sa_handler = ignored ? SIG_IGN : SIG_DFL;
    sigaction(signal, &action,
              nullptr);  // refused for SIGKILL, SIGSTOP and the C library's own two
  }
  const itimerval off{};
  setitimer(ITIMER_REAL, &off, nullptr);
  setitimer(ITIMER_VIRTUAL, &off, nullptr);
  setitimer(ITIMER_PROF, &off, nullptr);
  alarm(0);
  sigset_t none;
  sigemptyset(&none);
  pthread_sigmask(SIG_SETMASK, &none, nullptr);
}

pid_t current_pid() noexcept { return getpid(); }

void exit_now(int code) noexcept { _exit(code); }

void set_process_name(const std::string& name) noexcept {
  prctl(PR_SET_NAME, name.c_str());  // the kernel cuts it
}

void end_unwatched_child(pid_t pid) noexcept {
  ::kill(pid, SIGKILL);
  while (waitpid(pid, nullptr, 0) < 0 && errno == EINTR) {
  }
}

std::optional<Descriptor> open_pidfd(pid_t pid) {
  const int fd = pidfd_open_raw(pid);
  if (fd >= 0) return Descriptor(fd);
  if (errno == ESRCH) return std::nullopt;
  if (errno == ENOSYS || errno == EPERM) {
    throw Error(ErrorCode::kUnsupported,
                "this platform lacks or forbids " + with_errno("pidfd_open"));
  }
  throw_errno("pidfd_open of process " + std::to_string(pid));
}

void require_platform() {
  std::string missing;
  const auto lacks = [&missing](const std::string& what) {
    missing += (missing.empty() ? "" : ", ") + what;
  };
  utsname system{};
  const std::string release = uname(&system) == 0 ? system.release : "unknown";
  if (kernel_version(release) < std::pair(5, 10)) {
    lacks("Linux 5.10 or newer (this is " + release + ")");
  }
  const Descriptor self(pidfd_open_raw(getpid()));
  if (!self.valid()) {
    lacks(with_errno("pidfd_open"));
  } else if (pidfd_send_signal_raw(self.get(), 0) != 0) {
    lacks(with_errno("pidfd_send_signal"));
  }
  const Descriptor memory(memfd_create("simpler-probe", MFD_CLOEXEC));
  if (!memory.valid()) lacks(with_errno("memfd_create"));
  if (!missing.empty())
    throw Error(ErrorCode::kUnsupported, "this platform lacks or forbids " + missing);
}

bool wait_process_end(int pidfd, Deadline deadline) noexcept {
  pollfd watched{pidfd, POLLIN, 0};
  while (true) {
    const Nanoseconds left = deadline.remaining_ns();
    const timespec timeout{static_cast<time_t>(left / kNanosecondsPerSecond),
                           static_cast<long>(left % kNanosecondsPerSecond)};
    const int count = ppoll(&watched, 1, deadline.is_never() ? nullptr : &timeout, nullptr);
    if (count > 0) return (watched.revents & POLLIN) != 0;
    if (count == 0 && deadline.passed()) return false;
    if (count < 0 && errno != EINTR) return false;
  }
}

bool send_signal(int pidfd, int signal) noexcept {
  return pidfd_send_signal_raw(pidfd, signal) == 0;
}

namespace {

ExitStatus wait_for_exit(int pidfd, int more_options) noexcept {
  siginfo_t info{};
  int result = 0;
  do {
    // WNOHANG: a process that a debugger holds has ended and yet cannot be reaped.
    result =
        waitid(kWaitByPidfd, static_cast<id_t>(pidfd), &info, WEXITED | WNOHANG | more_options);
  } while (result != 0 && errno == EINTR);
  if (result != 0) {
    return {errno == ECHILD ? ExitStatus::Kind::kTakenByAnotherWaiter : ExitStatus::Kind::kUnknown,
            0, false};
  }
  if (info.si_pid == 0) return {};
  switch (info.si_code) {
    case CLD_EXITED:
      return {ExitStatus::Kind::kExited, info.si_status, false};
    case CLD_KILLED:
      return {ExitStatus::Kind::kSignalled, info.si_status, false};
    case CLD_DUMPED:
      return {ExitStatus::Kind::kSignalled, info.si_status, true};
    default:
      return {};
  }
}

}  // namespace

ExitStatus exit_status(int pidfd) noexcept { return wait_for_exit(pidfd, WNOWAIT); }

ExitStatus reap(int pidfd) noexcept { return wait_for_exit(pidfd, 0); }

std::optional<ExitStatus> exiting_status(int pidfd, pid_t pid) noexcept {
  constexpr int kFlagsField = 9, kExitCodeField = 52;  // as proc(5) counts them
  constexpr long kExiting = 0x4;                       // the kernel's PF_EXITING
  std::array<char, 4096> line;
  const std::string path = "/proc/" + std::to_string(pid) + "/stat";
  const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file.valid()) return std::nullopt;
  const ssize_t length = read(file.get(), line.data(), line.size() - 1);
  if (length <= 0) return std::nullopt;
  line[static_cast<std::size_t>(length)] = '\0';
  const char* at = std::strrchr(line.data(), ')');  // the name before it may hold anything
  if (at == nullptr) return std::nullopt;
  long exit_code = 0;
  for (int field = 3; field <= kExitCodeField; ++field) {
    at = std::strchr(at, ' ');
    if (at == nullptr) return std::nullopt;
    ++at;
    if (field != kFlagsField && field != kExitCodeField) continue;
    const long value = std::strtol(at, nullptr, 10);
    if (field == kFlagsField && (value & kExiting) == 0) return std::nullopt;
    if (field == kExitCodeField) exit_code = value;
  }
  // Not reaped until now: what was read is about this process and no later one of its number.
  if (exit_code == 0 || !send_signal(pidfd, 0)) return std::nullopt;
  const int status = static_cast<int>(exit_code);
  if (WIFEXITED(status)) return ExitStatus{ExitStatus::Kind::kExited, WEXITSTATUS(status), false};
  if (!WIFSIGNALED(status)) return std::nullopt;
  return ExitStatus{ExitStatus::Kind::kSignalled, WTERMSIG(status), WCOREDUMP(status) != 0};
}

std::string describe_exit(const ExitStatus& status) {
  switch (status.kind) {
    case ExitStatus::Kind::kExited:
      return "exited with code " + std::to_string(status.value);
    case ExitStatus::Kind::kSignalled:
      return "killed by " + describe_signal(status.value) +
             (status.core_dumped ? ", core dumped" : "");
    case ExitStatus::Kind::kTakenByAnotherWaiter:
      return "ended; exit status taken by another waiter";
    case ExitStatus::Kind::kUnknown:
      break;
  }
  return "ended; exit status unknown";
}

std::optional<std::uint64_t> cgroup_oom_kills() noexcept {
  // Found once: looking the group up takes longer than all else that happens at a death.
  static const std::optional<std::string> file = [] {
    try {
      return cgroup::oom_file(cgroup::kOwnProcess);
    } catch (const std::exception&) {
      return std::optional<std::string>();
    }
  }();
  try {
    return file ? cgroup::oom_kills_in(*file) : std::nullopt;
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

int usable_cores() noexcept {
  try {
    const int cores = affinity_cores().value_or(static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)));
    const double quota =
        cgroup::cpu_quota(cgroup::kOwnProcess).value_or(static_cast<double>(cores));
    return std::max(
        1,
        std::min(cores, static_cast<int>(std::ceil(std::min(quota, static_cast<double>(cores))))));
  } catch (const std::exception&) {
    return 1;
  }
}

}  // namespace simpler
