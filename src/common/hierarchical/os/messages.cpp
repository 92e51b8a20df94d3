#include "hierarchical/os/messages.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "hierarchical/base/error.h"

namespace simpler {

namespace {

using ControlBuffer = std::array<char, CMSG_SPACE(sizeof(int))>;

// Calls again while a signal handler got in the way.
template <typename Call>
ssize_t retry(Call call) noexcept {
  ssize_t result = -1;
  do {
    result = call();
  } while (result < 0 && errno == EINTR);
  return result;
}

}  // namespace

std::pair<Descriptor, Descriptor> make_pipe() {
  std::array<int, 2> ends{};
  if (pipe2(ends.data(), O_CLOEXEC) != 0) throw_errno("pipe2");
  return {Descriptor(ends[0]), Descriptor(ends[1])};
}

bool send_record(int socket, std::span<const std::byte> record, int descriptor) noexcept {
  iovec part{const_cast<std::byte*>(record.data()), record.size()};
  alignas(cmsghdr) ControlBuffer control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (descriptor >= 0) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &descriptor, sizeof(int));
  }
  const ssize_t sent = retry([&] { return sendmsg(socket, &message, MSG_NOSIGNAL); });
  return sent == static_cast<ssize_t>(record.size());
}

bool receive_record(int socket, std::span<std::byte> record, Descriptor& descriptor) noexcept {
  iovec part{record.data(), record.size()};
  alignas(cmsghdr) ControlBuffer control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  const ssize_t got =
      retry([&] { return recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_WAITALL); });
  if (got < 0) return false;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
      int received = -1;
      std::memcpy(&received, CMSG_DATA(header), sizeof(int));
      descriptor = Descriptor(received);
    }
  }
  return got == static_cast<ssize_t>(record.size());
}

bool write_record(int pipe, std::span<const std::byte> record) noexcept {
  const ssize_t written = retry([&] { return write(pipe, record.data(), record.size()); });
  return written == static_cast<ssize_t>(record.size());
}

bool read_record(int pipe, std::span<std::byte> record) noexcept {
  const ssize_t got = retry([&] { return read(pipe, record.data(), record.size()); });
  return got == static_cast<ssize_t>(record.size());
}

std::optional<std::size_t> poll_receive(int socket, std::span<std::byte> buffer) noexcept {
  const ssize_t got =
      retry([&] { return recv(socket, buffer.data(), buffer.size(), MSG_DONTWAIT); });
  if (got > 0) return static_cast<std::size_t>(got);
  if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return 0;
  return std::nullopt;
}

}  // namespace simpler
