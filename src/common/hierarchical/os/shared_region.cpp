#include "hierarchical/os/shared_region.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <mutex>
#include <optional>
#include <vector>

#include "hierarchical/base/error.h"
#include "hierarchical/os/cgroup.h"
#include "hierarchical/os/descriptor.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U  // Linux 6.3
#endif

namespace simpler {
namespace {

// All regions of this process. Its mutex is held from a region's memfd_create to its registration,
// and across every fork: a child forked by another thread meanwhile never holds a stray descriptor
// or an unregistered mapping.
class Registry {
 public:
  static Registry& instance() {
    static Registry* const registry =
        new Registry;  // never destroyed: regions may outlive static destructors
    return *registry;
  }

  std::mutex mutex;
  std::vector<const SharedRegion*> regions;

 private:
  Registry() {
    pthread_atfork([] { instance().mutex.lock(); }, [] { instance().mutex.unlock(); },
                   [] { instance().mutex.unlock(); });
  }
};

std::size_t page_size() noexcept {
  static const auto size = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return size;
}

// MemAvailable and SwapFree of /proc/meminfo, and what the control group leaves.
std::optional<std::uint64_t> free_memory() {
  std::ifstream file("/proc/meminfo");
  std::uint64_t available = 0, swap = 0;
  bool known = false;
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("MemAvailable:")) {
      available = std::strtoull(line.c_str() + 13, nullptr, 10) * 1024;
      known = true;
    } else if (line.starts_with("SwapFree:")) {
      swap = std::strtoull(line.c_str() + 9, nullptr, 10) * 1024;
    }
  }
  const std::optional<std::uint64_t> left = cgroup::memory_left(cgroup::kOwnProcess);
  if (!known) return left;
  return std::min(available, left.value_or(available)) + swap;
}

[[noreturn]] void throw_out_of_memory(const std::string& name, std::size_t nbytes,
                                      std::optional<std::uint64_t> available) {
  throw Error(ErrorCode::kOutOfMemory,
              "shared region '" + name + "' needs " + std::to_string(nbytes) +
                  " bytes of memory; " +
                  (available ? std::to_string(*available) + " bytes are free"
                             : "how many are free is unknown"));
}

Descriptor create_memfd(const std::string& name) {
  const std::string shown = name.substr(0, 200);  // the kernel's limit is 249
  int fd = memfd_create(shown.c_str(), MFD_CLOEXEC | MFD_NOEXEC_SEAL);
  if (fd < 0 && errno == EINVAL) fd = memfd_create(shown.c_str(), MFD_CLOEXEC);
  if (fd < 0) throw_errno("memfd_create for shared region '" + name + "'");
  return Descriptor(fd);
}

void commit_pages(int fd, std::size_t nbytes, const std::string& name) {
  int result = 0;
  do {
    result = fallocate(fd, 0, 0, static_cast<off_t>(nbytes));
  } while (result != 0 && errno == EINTR);
  if (result == 0) return;
  if (errno == ENOSPC || errno == ENOMEM || errno == EFBIG)
    throw_out_of_memory(name, nbytes, free_memory());
  throw_errno("fallocate of " + std::to_string(nbytes) + " bytes for shared region '" + name + "'");
}

std::size_t whole_pages(std::size_t nbytes, const std::string& name) {
  if (nbytes == 0)
    throw Error(ErrorCode::kInvalidArgument, "shared region '" + name + "' of 0 bytes");
  const std::size_t mask = page_size() - 1;
  if (nbytes > static_cast<std::size_t>(std::numeric_limits<off_t>::max()) - mask) {
    throw_out_of_memory(name, nbytes, free_memory());
  }
  return (nbytes + mask) & ~mask;
}

}  // namespace

SharedRegion::SharedRegion(std::size_t nbytes, const std::string& name, Pages pages)
    : size_(whole_pages(nbytes, name)) {
  if (pages == Pages::kCommitted) {
    // Under a control group's limit fallocate does not fail: the kernel kills the process.
    const std::optional<std::uint64_t> available = free_memory();
    if (available && size_ > *available) throw_out_of_memory(name, size_, available);
  }
  Registry& registry = Registry::instance();
  const std::lock_guard lock(registry.mutex);
  registry.regions.reserve(registry.regions.size() + 1);
  const Descriptor fd = create_memfd(name);
  if (ftruncate(fd.get(), static_cast<off_t>(size_)) != 0) {
    throw_errno("ftruncate to " + std::to_string(size_) + " bytes for shared region '" + name +
                "'");
  }
  if (pages == Pages::kCommitted) commit_pages(fd.get(), size_, name);
  const int flags = MAP_SHARED | (pages == Pages::kSparse ? MAP_NORESERVE : 0);
  void* const mapped = mmap(nullptr, size_, PROT_READ | PROT_WRITE, flags, fd.get(), 0);
  if (mapped == MAP_FAILED) {
    throw_errno("mmap of " + std::to_string(size_) + " bytes for shared region '" + name + "'");
  }
  madvise(mapped, size_, MADV_DONTDUMP);  // a child's core would hold every arena of the tree
  data_ = static_cast<std::byte*>(mapped);
  registry.regions.push_back(this);
}

SharedRegion::~SharedRegion() {
  Registry& registry = Registry::instance();
  const std::lock_guard lock(registry.mutex);
  std::erase(registry.regions, this);
  munmap(data_, size_);
}

bool SharedRegion::contains(std::uintptr_t address, std::size_t nbytes) const noexcept {
  const auto start = reinterpret_cast<std::uintptr_t>(data_);
  if (address < start || address - start > size_) return false;
  return nbytes <= size_ - (address - start);
}

void SharedRegion::release_pages(std::size_t offset, std::size_t nbytes) const noexcept {
  const std::size_t mask = page_size() - 1;
  const std::size_t first = (offset + mask) & ~mask;
  const std::size_t last = (offset + nbytes) & ~mask;
  if (first < last) madvise(data_ + first, last - first, MADV_REMOVE);
}

std::size_t SharedRegion::resident_bytes() const {
  constexpr std::size_t kPagesAtOnce = 4096;
  std::array<unsigned char, kPagesAtOnce> present{};
  const std::size_t step = kPagesAtOnce * page_size();
  std::size_t pages = 0;
  for (std::size_t offset = 0; offset < size_; offset += step) {
    const std::size_t nbytes = std::min(step, size_ - offset);
    if (mincore(data_ + offset, nbytes, present.data()) != 0)
      throw_errno("mincore of a shared region");
    const auto end = present.begin() + static_cast<std::ptrdiff_t>(nbytes / page_size());
    pages += static_cast<std::size_t>(
        std::count_if(present.begin(), end, [](unsigned char p) { return p & 1; }));
  }
  return pages * page_size();
}

void seal_regions_except(std::span<const SharedRegion* const> keep) noexcept {
  for (const SharedRegion* region : Registry::instance().regions) {
    if (std::find(keep.begin(), keep.end(), region) != keep.end()) continue;
    // The address stays taken: the region's object may still unmap it in this process. Without
    // room for one more mapping it is left free, since the memory must end with its owner.
    if (mmap(region->data(), region->size(), PROT_NONE,
             MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) == MAP_FAILED) {
      munmap(region->data(), region->size());
    }
  }
}

}  // namespace simpler
