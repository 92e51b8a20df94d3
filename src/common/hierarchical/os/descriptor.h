// An owned file descriptor, and what a child must do with the ones it inherited.
#pragma once

#include <cstddef>
#include <span>
#include <utility>

namespace simpler {

class Descriptor {
 public:
  Descriptor() noexcept = default;
  explicit Descriptor(int fd) noexcept : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept;
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() { reset(); }

  [[nodiscard]] int get() const noexcept { return fd_; }
  [[nodiscard]] bool valid() const noexcept { return fd_ >= 0; }
  int release() noexcept { return std::exchange(fd_, -1); }
  void reset() noexcept;

 private:
  int fd_ = -1;
};

// Two ends of a connected Unix stream socket, close-on-exec. Throws Error{kSystem}.
std::pair<Descriptor, Descriptor> make_socket_pair();

// Writes a length prefix and the bytes as one frame, whole, however long it takes; false when the
// reader is gone.
bool send_frame(int socket, std::span<const std::byte> bytes) noexcept;

// A non-blocking, close-on-exec eventfd. Throws Error{kSystem}.
Descriptor make_event();
// Makes the eventfd readable, and unreadable again.
void event_notify(int event) noexcept;
void event_drain(int event) noexcept;

// In a new child: points every inherited socket, pipe, named FIFO, eventfd, epoll, pidfd and other
// anonymous descriptor at /dev/null by dup2, so that the peer of each notices when its real owner
// ends while the number stays taken (closing it would let the Python object that owns it close a
// stranger's file later). Regular files, memfds, directories, devices, terminals, 0, 1, 2 and
// `keep` stay. Reads /proc/self/fd; where that is missing, asks fstat for every number below the
// limit.
void detach_inherited_descriptors(std::span<const int> keep) noexcept;

}  // namespace simpler
