#include "hierarchical/base/error.h"

#include <cerrno>
#include <system_error>

namespace simpler {

void throw_errno(const std::string& what) {
  const int code = errno;
  throw Error(ErrorCode::kSystem, what + ": " + std::generic_category().message(code));
}

}  // namespace simpler
