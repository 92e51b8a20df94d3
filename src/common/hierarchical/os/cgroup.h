// What this process's control groups (v1, v2 or both) allow and have counted.
//
// Every function takes the directory to read in place of /proc/self, so that tests can give it a
// copy; the mount points named in its `mountinfo` are read as they stand. Thread safety: no state;
// any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace simpler::cgroup {

inline const std::string kOwnProcess = "/proc/self";

// The visible directories that apply to this process for a v1 controller ("memory", "cpu"), or for
// v2 when `controller` is empty: its own group first, the mount's root last. A group outside the
// mount (another cgroup namespace) gives the mount's root alone; empty when nothing is mounted.
std::vector<std::string> directories(const std::string& process_dir, const std::string& controller);

// Where the kernel counts the processes of this group that it has killed for lack of memory, and
// the count there.
std::optional<std::string> oom_file(const std::string& process_dir);
std::optional<std::uint64_t> oom_kills_in(const std::string& file);
std::optional<std::uint64_t> oom_kills(const std::string& process_dir);

// Cores' worth of time per period, the least over the group and its parents; nullopt when
// unlimited.
std::optional<double> cpu_quota(const std::string& process_dir);

// Bytes that may still be charged, page cache that can be dropped included; nullopt when unlimited.
std::optional<std::uint64_t> memory_left(const std::string& process_dir);

}  // namespace simpler::cgroup
