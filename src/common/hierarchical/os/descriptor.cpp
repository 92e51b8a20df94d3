#include "hierarchical/os/descriptor.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <optional>
#include <string_view>

#include "hierarchical/base/error.h"

namespace simpler {
namespace {

// File systems behind descriptors without a path (linux/magic.h, of which old copies lack some).
constexpr std::array<unsigned long, 6> kAnonymousFileSystems = {
    0x09041934,  // anon_inodefs: eventfd, epoll, timerfd, pidfd before 6.9
    0x50494446,  // pidfs
    0x534F434B,  // sockfs
    0x50495045,  // pipefs
    0x6E736673,  // nsfs
    0x19800202,  // mqueue
};
constexpr int kMostNumbersAsked =
    1 << 20;  // the kernel's default fs.nr_open; a limit may be "infinite"

// By the link's text: a pidfd is a regular file by its mode on new kernels. Nullopt without /proc.
std::optional<bool> is_anonymous_by_link(int fd) noexcept {
  std::array<char, 32> path{};
  std::snprintf(path.data(), path.size(), "/proc/self/fd/%d", fd);
  std::array<char, 64> target{};
  const ssize_t nbytes = readlink(path.data(), target.data(), target.size());
  if (nbytes <= 0) return std::nullopt;
  const std::string_view text(target.data(), static_cast<std::size_t>(nbytes));
  return !text.starts_with('/') && !text.starts_with("(unreachable)");
}

bool is_anonymous_by_file_system(int fd) noexcept {
  struct statfs info{};
  if (fstatfs(fd, &info) != 0) return false;
  const auto type = static_cast<unsigned long>(info.f_type) & 0xFFFFFFFFUL;
  return std::find(kAnonymousFileSystems.begin(), kAnonymousFileSystems.end(), type) !=
         kAnonymousFileSystems.end();
}

bool must_detach(int fd) noexcept {
  struct stat info{};
  if (fstat(fd, &info) != 0) return false;
  if (S_ISFIFO(info.st_mode) || S_ISSOCK(info.st_mode)) return true;
  const std::optional<bool> anonymous = is_anonymous_by_link(fd);
  return anonymous ? *anonymous : is_anonymous_by_file_system(fd);
}

int open_nothing() noexcept {
  int fd = open("/dev/null", O_RDWR | O_CLOEXEC);
  if (fd < 0) fd = open("/", O_PATH | O_CLOEXEC);
  if (fd < 0) fd = memfd_create("nothing", MFD_CLOEXEC);
  return fd;
}

class Detacher {
 public:
  explicit Detacher(std::span<const int> keep) noexcept : keep_(keep), nothing_(open_nothing()) {}
  Detacher(const Detacher&) = delete;
  Detacher& operator=(const Detacher&) = delete;
  ~Detacher() {
    if (!nothing_is_inherited_ && nothing_ >= 0) close(nothing_);
  }

  void visit(int fd) noexcept {
    if (fd <= 2 || fd == nothing_ || std::find(keep_.begin(), keep_.end(), fd) != keep_.end())
      return;
    const int flags = fcntl(fd, F_GETFD);
    if (flags < 0 || !must_detach(fd)) return;
    const int close_on_exec = (flags & FD_CLOEXEC) != 0 ? O_CLOEXEC : 0;
    if (nothing_ < 0 && !take_over(fd)) return;
    if (fd != nothing_) dup3(nothing_, fd, close_on_exec);
  }

 private:
  // With every number in use there is none for /dev/null: it takes the first inherited one's place,
  // which is the lowest free number once that is closed.
  bool take_over(int fd) noexcept {
    close(fd);
    nothing_ = open_nothing();
    nothing_is_inherited_ = nothing_ == fd;
    return nothing_ >= 0;
  }

  std::span<const int> keep_;
  int nothing_;
  bool nothing_is_inherited_ = false;
};

bool visit_listed(Detacher& detacher) noexcept {
  DIR* const directory = opendir("/proc/self/fd");
  if (directory == nullptr) return false;
  const int own = dirfd(directory);
  while (const dirent* entry = readdir(directory)) {
    int fd = -1;
    const char* const end = entry->d_name + std::strlen(entry->d_name);
    const auto parsed = std::from_chars(entry->d_name, end, fd);
    if (parsed.ec == std::errc{} && parsed.ptr == end && fd != own) detacher.visit(fd);
  }
  closedir(directory);
  return true;
}

void visit_all_numbers(Detacher& detacher) noexcept {
  rlimit limit{};
  int count = kMostNumbersAsked;
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < static_cast<rlim_t>(count)) {
    count = static_cast<int>(limit.rlim_cur);
  }
  for (int fd = 3; fd < count; ++fd) detacher.visit(fd);
}

}  // namespace

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  if (this != &other) {
    reset();
    fd_ = std::exchange(other.fd_, -1);
  }
  return *this;
}

void Descriptor::reset() noexcept {
  if (fd_ < 0) return;
  const int saved = errno;  // a destructor must not change the error being reported
  close(std::exchange(fd_, -1));
  errno = saved;
}

std::pair<Descriptor, Descriptor> make_socket_pair() {
  std::array<int, 2> ends{};
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) != 0)
    throw_errno("socketpair");
  return {Descriptor(ends[0]), Descriptor(ends[1])};
}

bool send_frame(int socket, std::span<const std::byte> bytes) noexcept {
  const auto length = static_cast<std::uint32_t>(bytes.size());
  std::array<iovec, 2> parts{{{const_cast<std::uint32_t*>(&length), sizeof length},
                              {const_cast<std::byte*>(bytes.data()), bytes.size()}}};
  std::size_t at = 0;
  while (at < parts.size()) {
    msghdr message{};
    message.msg_iov = &parts[at];
    message.msg_iovlen = parts.size() - at;
    ssize_t sent = sendmsg(socket, &message, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return false;
    while (at < parts.size() && static_cast<std::size_t>(sent) >= parts[at].iov_len) {
      sent -= static_cast<ssize_t>(parts[at++].iov_len);
    }
    if (at == parts.size()) break;
    parts[at].iov_base = static_cast<char*>(parts[at].iov_base) + sent;
    parts[at].iov_len -= static_cast<std::size_t>(sent);
  }
  return true;
}

Descriptor make_event() {
  const int fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (fd < 0) throw_errno("eventfd");
  return Descriptor(fd);
}

void event_notify(int event) noexcept {
  const std::uint64_t one = 1;
  // Refused only when the count would overflow, and then it is readable anyway.
  [[maybe_unused]] const ssize_t written = write(event, &one, sizeof one);
}

void event_drain(int event) noexcept {
  std::uint64_t count = 0;
  [[maybe_unused]] const ssize_t got = read(event, &count, sizeof count);
}

void detach_inherited_descriptors(std::span<const int> keep) noexcept {
  Detacher detacher(keep);
  if (!visit_listed(detacher)) visit_all_numbers(detacher);
}

}  // namespace simpler
