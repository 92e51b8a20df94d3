// Why a call to a child did not give its reply.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <utility>

#include "hierarchical/ipc/error_codec.h"

namespace simpler {

class CallError : public std::exception {
 public:
  enum class Kind : std::uint8_t {
    kRemote,        // the child answered with `failure`
    kDied,          // the child is dead; the message is its first cause
    kTimedOut,      // `started` says whether the child had begun
    kInterrupted,   // a signal handler wants the call to end; `started` likewise
    kClosed,        // the tree is closing or closed
    kBackPressure,  // too much is queued
    kProtocol,      // the child's reply does not decode
    kStartup,       // the process could not be brought up
  };

  CallError(Kind error_kind, int worker_index, std::string text, bool has_started = false)
      : kind(error_kind), worker(worker_index), message(std::move(text)), started(has_started) {}
  CallError(int worker_index, RemoteFailure remote)
      : kind(Kind::kRemote),
        worker(worker_index),
        message(remote.message),
        failure(std::move(remote)) {}

  [[nodiscard]] const char* what() const noexcept override { return message.c_str(); }

  Kind kind;
  int worker;  // -1: no one in particular
  std::string message;
  bool started = false;
  RemoteFailure failure;   // with kRemote
  std::string waited_for;  // with kTimedOut, like the next
  double timeout_s = 0;
};

}  // namespace simpler
