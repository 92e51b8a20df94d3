#include "hierarchical/os/shared_region.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "child_process.h"
#include "hierarchical/base/error.h"

namespace simpler {
namespace {

using Pages = SharedRegion::Pages;
using testing::ChildProcess;

std::string read_file(const std::string& path) {
  std::string text;
  const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  std::array<char, 4096> part{};
  for (ssize_t n = 0; (n = read(file.get(), part.data(), part.size())) > 0;)
    text.append(part.data(), static_cast<std::size_t>(n));
  return text;
}

int count_memfds() {
  int count = 0;
  DIR* const directory = opendir("/proc/self/fd");
  while (const dirent* entry = readdir(directory)) {
    std::array<char, 256> target{};
    const std::string path = std::string("/proc/self/fd/") + entry->d_name;
    if (readlink(path.c_str(), target.data(), target.size() - 1) > 0)
      count += std::strstr(target.data(), "memfd:") != nullptr;
  }
  closedir(directory);
  return count;
}

// What the memfd behind `region` occupies; nullopt where /proc/self/map_files is closed to this
// process.
std::optional<std::size_t> allocated_bytes(const SharedRegion& region) {
  std::array<char, 96> path{};
  std::snprintf(path.data(), path.size(), "/proc/self/map_files/%zx-%zx", region.address(),
                region.address() + region.size());
  struct stat info{};
  if (stat(path.data(), &info) != 0) return std::nullopt;
  return static_cast<std::size_t>(info.st_blocks) * 512;
}

TEST(SharedRegion, BytesArePagesOfZeroes) {
  const SharedRegion region(1, "test", Pages::kSparse);
  EXPECT_EQ(region.size(), static_cast<std::size_t>(sysconf(_SC_PAGESIZE)));
  EXPECT_EQ(region.data()[region.size() - 1], std::byte{0});
}

TEST(SharedRegion, LeavesNoDescriptorAndShowsItsName) {
  const int before = count_memfds();
  const SharedRegion region(4096, "simpler-name-test", Pages::kCommitted);
  EXPECT_EQ(count_memfds(), before);
  EXPECT_NE(read_file("/proc/self/maps").find("memfd:simpler-name-test"), std::string::npos);
}

TEST(SharedRegion, AChildWritesAtTheSameAddress) {
  const SharedRegion region(4096, "test", Pages::kCommitted);
  ChildProcess child([&region] {
    region.data()[5] = std::byte{42};
    return 0;
  });
  EXPECT_EQ(child.finish_and_describe(), "exited with code 0");
  EXPECT_EQ(region.data()[5], std::byte{42});
}

TEST(SharedRegion, ContainsOnlyWhatLiesWhollyInside) {
  const SharedRegion region(4096, "test", Pages::kSparse);
  const std::uintptr_t start = region.address();
  EXPECT_TRUE(region.contains(start, region.size()));
  EXPECT_TRUE(region.contains(start + region.size(), 0));
  EXPECT_FALSE(region.contains(start + 1, region.size()));
  EXPECT_FALSE(region.contains(start - 1, 1));
  EXPECT_FALSE(region.contains(start + 1, SIZE_MAX));
  EXPECT_FALSE(region.contains(UINTPTR_MAX, 2));
}

TEST(SharedRegion, LC7_CommittedPagesAreHadAtOnceAndSparseOnesWithTheFirstTouch) {
  const std::size_t nbytes = std::size_t{64} << 12;
  const SharedRegion committed(nbytes, "test", Pages::kCommitted);
  const SharedRegion sparse(nbytes, "test", Pages::kSparse);
  const std::optional<std::size_t> committed_bytes = allocated_bytes(committed);
  if (!committed_bytes) GTEST_SKIP() << "this process may not look behind its mappings";
  EXPECT_EQ(committed_bytes, committed.size());
  EXPECT_EQ(allocated_bytes(sparse), 0U);
  EXPECT_EQ(sparse.resident_bytes(), 0U);
  sparse.data()[0] = std::byte{1};
  EXPECT_EQ(sparse.resident_bytes(), static_cast<std::size_t>(sysconf(_SC_PAGESIZE)));
}

TEST(SharedRegion, LC7_ReleasedPagesGoBackAndReadAsZeroInEveryProcess) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const SharedRegion region(4 * page, "test", Pages::kSparse);
  std::memset(region.data(), 1, region.size());
  EXPECT_EQ(region.resident_bytes(), 4 * page);
  region.release_pages(page - 1, 2 * page);  // only page 1 lies wholly inside
  EXPECT_EQ(region.resident_bytes(), 3 * page);
  ChildProcess child([&] {
    return static_cast<int>(region.data()[page]) * 2 + static_cast<int>(region.data()[page - 1]);
  });
  EXPECT_EQ(child.finish_and_describe(), "exited with code 1");
}

TEST(SharedRegion, LC7_CommittedPagesThatCannotBeHadAreRefusedWithTheBytesNeededAndFree) {
  try {
    const SharedRegion region(std::size_t{1} << 50, "far too much", Pages::kCommitted);
    FAIL() << "a pebibyte was committed";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
    const std::string text = error.what();
    EXPECT_NE(text.find("needs 1125899906842624 bytes"), std::string::npos) << text;
    EXPECT_NE(text.find("bytes are free"), std::string::npos) << text;
  }
  EXPECT_THROW(SharedRegion(SIZE_MAX, "test", Pages::kSparse), Error);
  EXPECT_THROW(SharedRegion(0, "test", Pages::kSparse), Error);
}

TEST(SharedRegion, ASealedRegionIsInaccessibleInTheChildAndOthersStay) {
  const SharedRegion mine(4096, "test", Pages::kCommitted);
  const SharedRegion other(4096, "test", Pages::kCommitted);
  ChildProcess child([&] {
    const std::array<const SharedRegion*, 1> keep{&mine};
    seal_regions_except(keep);
    mine.data()[0] = std::byte{9};
    const volatile std::byte* const sealed = other.data();
    return static_cast<int>(*sealed);
  });
  EXPECT_EQ(child.finish_and_describe(), "killed by SIGSEGV (segmentation fault)");
  EXPECT_EQ(mine.data()[0], std::byte{9});
}

TEST(SharedRegion, SealingDropsTheChildsHoldOnTheMemory) {
  const SharedRegion other(4096, "simpler-seal-test", Pages::kCommitted);
  ChildProcess child([] {
    seal_regions_except({});
    return read_file("/proc/self/maps").find("memfd:simpler-seal-test") == std::string::npos ? 0
                                                                                             : 1;
  });
  EXPECT_EQ(child.finish_and_describe(), "exited with code 0");
}

TEST(SharedRegion, DestroyingASealedRegionInTheChildIsHarmless) {
  auto other = std::make_unique<SharedRegion>(4096, "test", Pages::kCommitted);
  other->data()[0] = std::byte{1};
  ChildProcess child([&other] {
    seal_regions_except({});
    other.reset();
    const SharedRegion own(4096, "test", Pages::kCommitted);  // the registry still works
    return static_cast<int>(own.data()[0]);
  });
  EXPECT_EQ(child.finish_and_describe(), "exited with code 0");
  EXPECT_EQ(other->data()[0], std::byte{1});
}

TEST(SharedRegion, AForkBesideAThreadThatMakesRegionsLeaksNeitherDescriptorNorMapping) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "libasan before gcc 14 does not hold its allocator's locks across fork(): a "
                  "child forked beside a "
                  "thread that allocates may hang in malloc";
#endif
  std::atomic<bool> stop{false};
  std::thread maker([&stop] {
    while (!stop) const SharedRegion region(1 << 16, "simpler-race-test", Pages::kCommitted);
  });
  for (int round = 0; round < 50; ++round) {
    ChildProcess child([] {
      if (count_memfds() != 0) return 1;
      seal_regions_except({});
      return read_file("/proc/self/maps").find("memfd:simpler-race-test") == std::string::npos ? 0
                                                                                               : 2;
    });
    EXPECT_EQ(child.finish_and_describe(), "exited with code 0");
  }
  stop = true;
  maker.join();
}

}  // namespace
}  // namespace simpler
