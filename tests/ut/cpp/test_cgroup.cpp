#include "hierarchical/os/cgroup.h"

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace simpler {
namespace {

namespace fs = std::filesystem;

// A process directory and cgroup mounts made of plain files.
class CgroupFiles : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "simpler cgroup XXXXXX")
                              .string();  // a space: escaped in mountinfo
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    root_ = pattern;
  }
  void TearDown() override { fs::remove_all(root_); }

  void write(const std::string& path, const std::string& text) const {
    const fs::path full = fs::path(root_) / path;
    fs::create_directories(full.parent_path());
    std::ofstream(full) << text;
  }
  [[nodiscard]] std::string mount(const std::string& root, const std::string& point,
                                  const std::string& tail) const {
    std::string escaped;
    for (const char c : root_ + "/" + point)
      escaped += c == ' ' ? std::string("\\040") : std::string(1, c);
    return "30 23 0:26 " + root + " " + escaped + " rw,nosuid shared:4 - " + tail + "\n";
  }
  [[nodiscard]] std::string process_dir() const { return root_ + "/proc"; }
  [[nodiscard]] std::string at(const std::string& path) const { return root_ + "/" + path; }

  void use_v2(const std::string& group, const std::string& mount_root = "/") const {
    write("proc/cgroup", "0::" + group + "\n");
    write("proc/mountinfo",
          mount("/", "other", "tmpfs tmpfs rw") + mount(mount_root, "v2", "cgroup2 cgroup2 rw"));
  }
  void use_v1(const std::string& group) const {
    write("proc/cgroup", "9:cpu,cpuacct:" + group + "\n8:memory:" + group + "\n0::/\n");
    write("proc/mountinfo", mount("/", "v1/cpu", "cgroup cgroup rw,cpu,cpuacct") +
                                mount("/", "v1/memory", "cgroup cgroup rw,memory"));
  }

  std::string root_;
};

TEST_F(CgroupFiles, ANestedGroupIsReadFromItselfUpToTheMount) {
  use_v2("/a/b");
  write("v2/a/b/x", "");
  EXPECT_EQ(cgroup::directories(process_dir(), ""),
            (std::vector<std::string>{at("v2/a/b"), at("v2/a"), at("v2")}));
}

TEST_F(CgroupFiles, AGroupThatIsNotVisibleFallsBackToTheMount) {
  use_v2("/a/b");
  write("v2/x", "");
  EXPECT_EQ(cgroup::directories(process_dir(), ""), (std::vector<std::string>{at("v2")}));
  use_v2("/../outside");
  EXPECT_EQ(cgroup::directories(process_dir(), ""), (std::vector<std::string>{at("v2")}));
}

TEST_F(CgroupFiles, AMountOfASubtreeIsReadBelowItsOwnRoot) {
  use_v2("/pod/box", "/pod");
  write("v2/box/x", "");
  EXPECT_EQ(cgroup::directories(process_dir(), ""),
            (std::vector<std::string>{at("v2/box"), at("v2")}));
  use_v2("/podother", "/pod");
  EXPECT_EQ(cgroup::directories(process_dir(), ""), (std::vector<std::string>{at("v2")}));
}

TEST_F(CgroupFiles, OomKillsComeFromMemoryEventsOnV2) {
  use_v2("/a");
  write("v2/a/memory.events", "low 0\nhigh 1\nmax 9\noom 3\noom_kill 2\noom_group_kill 0\n");
  EXPECT_EQ(cgroup::oom_kills(process_dir()), 2U);
}

TEST_F(CgroupFiles, OomKillsComeFromOomControlOnV1) {
  use_v1("/a");
  write("v1/memory/a/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n");
  EXPECT_EQ(cgroup::oom_kills(process_dir()), 5U);
}

TEST_F(CgroupFiles, NothingToReadIsNoNumber) {
  EXPECT_EQ(cgroup::oom_kills(process_dir()), std::nullopt);
  EXPECT_EQ(cgroup::cpu_quota(process_dir()), std::nullopt);
  EXPECT_EQ(cgroup::memory_left(process_dir()), std::nullopt);
  use_v2("/a");
  write("v2/a/memory.events", "oom_kill many\n");
  write("v2/a/cpu.max", "max 100000\n");
  EXPECT_EQ(cgroup::oom_kills(process_dir()), std::nullopt);
  EXPECT_EQ(cgroup::cpu_quota(process_dir()), std::nullopt);
}

TEST_F(CgroupFiles, TheCpuQuotaIsTheLeastOfTheGroupAndItsParents) {
  use_v2("/a/b");
  write("v2/a/b/cpu.max", "400000 100000\n");
  write("v2/a/cpu.max", "150000 100000\n");
  write("v2/cpu.max", "max 100000\n");
  EXPECT_DOUBLE_EQ(cgroup::cpu_quota(process_dir()).value(), 1.5);
}

TEST_F(CgroupFiles, TheCpuQuotaOfV1IsQuotaOverPeriodAndMinusOneIsNone) {
  use_v1("/a");
  write("v1/cpu/a/cpu.cfs_period_us", "100000\n");
  write("v1/cpu/a/cpu.cfs_quota_us", "-1\n");
  EXPECT_EQ(cgroup::cpu_quota(process_dir()), std::nullopt);
  write("v1/cpu/a/cpu.cfs_quota_us", "250000\n");
  EXPECT_DOUBLE_EQ(cgroup::cpu_quota(process_dir()).value(), 2.5);
}

TEST_F(CgroupFiles, MemoryLeftCountsTheCacheThatCanBeDropped) {
  use_v2("/a");
  write("v2/a/memory.max", "1000\n");
  write("v2/a/memory.current", "900\n");
  write("v2/a/memory.stat", "anon 500\nfile 400\ninactive_file 250\nactive_file 50\n");
  EXPECT_EQ(cgroup::memory_left(process_dir()), 400U);
  write("v2/a/memory.max", "max\n");
  EXPECT_EQ(cgroup::memory_left(process_dir()), std::nullopt);
}

TEST_F(CgroupFiles, MemoryLeftOfV1IgnoresTheNumberThatMeansNoLimit) {
  use_v1("/a");
  write("v1/memory/a/memory.limit_in_bytes", "9223372036854771712\n");
  write("v1/memory/a/memory.usage_in_bytes", "900\n");
  EXPECT_EQ(cgroup::memory_left(process_dir()), std::nullopt);
  write("v1/memory/memory.limit_in_bytes", "800\n");
  write("v1/memory/memory.usage_in_bytes", "900\n");
  EXPECT_EQ(cgroup::memory_left(process_dir()), 0U);
}

}  // namespace
}  // namespace simpler
