// What one memcpy costs, by the state of the memory it writes to.
//
// copies STATE BYTES COUNT
//   STATE  warm: into a shared mapping whose pages are there, from private memory, as a payload is
//          staged; fresh: out of that mapping into memory from malloc, which is freed again, as a
//          bytes object is made and dropped
// Writes COUNT samples to standard output as native 64-bit nanoseconds, after two that do not
// count.
#include <sys/mman.h>
#include <time.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

namespace {

std::int64_t now() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return std::int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

// The compiler must not drop a copy that nothing reads.
void keep(void* memory) { asm volatile("" : : "r"(memory) : "memory"); }

void copy_fresh(const std::byte* shared, std::size_t nbytes) {
  void* fresh = std::malloc(nbytes);
  if (fresh == nullptr) std::abort();
  std::memcpy(fresh, shared, nbytes);
  keep(fresh);
  std::free(fresh);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "usage: %s STATE BYTES COUNT\n", argv[0]);
    return 2;
  }
  const bool warm = std::string_view(argv[1]) == "warm";
  const std::size_t nbytes = std::stoull(argv[2]);
  void* memory = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return 1;
  auto* shared = static_cast<std::byte*>(memory);
  const std::vector<std::byte> own(nbytes, std::byte{1});
  std::memcpy(shared, own.data(), nbytes);
  std::vector<std::int64_t> samples(2 + std::stoull(argv[3]));
  for (std::int64_t& sample : samples) {
    const std::int64_t start = now();
    if (warm) {
      std::memcpy(shared, own.data(), nbytes);
      keep(shared);
    } else {
      copy_fresh(shared, nbytes);
    }
    sample = now() - start;
  }
  const std::size_t count = samples.size() - 2;
  return std::fwrite(samples.data() + 2, sizeof samples[0], count, stdout) == count ? 0 : 1;
}
