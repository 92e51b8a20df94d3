// Bytes between processes: fixed-size records, some with a descriptor, and streams.
//
// No function throws; a closed or broken peer is a result.
// Thread safety: one reader and one writer per descriptor.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <utility>

#include "hierarchical/os/descriptor.h"

namespace simpler {

// The reading end, then the writing end, close-on-exec. Throws Error{kSystem}.
std::pair<Descriptor, Descriptor> make_pipe();

// One record over a Unix stream socket with at most one descriptor (-1: none). False when the peer
// is gone.
bool send_record(int socket, std::span<const std::byte> record, int descriptor) noexcept;
// Waits for a whole record. `descriptor` becomes the one that came with it, close-on-exec.
bool receive_record(int socket, std::span<std::byte> record, Descriptor& descriptor) noexcept;

// One record over a pipe, at most PIPE_BUF bytes: written whole or not at all.
bool write_record(int pipe, std::span<const std::byte> record) noexcept;
bool read_record(int pipe, std::span<std::byte> record) noexcept;

// What a stream socket has at once, cut to the buffer: 0 when there is nothing yet, nullopt when
// the stream has ended or broken.
std::optional<std::size_t> poll_receive(int socket, std::span<std::byte> buffer) noexcept;

}  // namespace simpler
