#include "hierarchical/os/cgroup.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string_view>

namespace simpler::cgroup {
namespace {

namespace fs = std::filesystem;

// v1 writes "no limit" as the largest multiple of the page size.
constexpr std::uint64_t kUnlimited = std::uint64_t{1} << 62;

std::optional<std::uint64_t> parse_number(std::string_view text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::vector<std::string> read_words(const std::string& path) {
  std::ifstream file(path);
  std::vector<std::string> words;
  for (std::string word; file >> word;) words.push_back(std::move(word));
  return words;
}

std::optional<std::uint64_t> read_number(const std::string& path) {
  const std::vector<std::string> words = read_words(path);
  return words.size() == 1 ? parse_number(words[0]) : std::nullopt;
}

// The value of "key value" in a file of such lines.
std::optional<std::uint64_t> read_key(const std::string& path, std::string_view key) {
  std::ifstream file(path);
  for (std::string name, value; file >> name >> value;) {
    if (name == key) return parse_number(value);
  }
  return std::nullopt;
}

bool lists(std::string_view comma_separated, std::string_view wanted) {
  while (true) {
    const std::size_t comma = comma_separated.find(',');
    if (comma_separated.substr(0, comma) == wanted) return true;
    if (comma == std::string_view::npos) return false;
    comma_separated.remove_prefix(comma + 1);
  }
}

// mountinfo writes space, tab, newline and backslash as \ooo.
std::string unescape(std::string_view text) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const bool octal = text[i] == '\\' && i + 3 < text.size() &&
                       std::all_of(text.begin() + static_cast<std::ptrdiff_t>(i) + 1,
                                   text.begin() + static_cast<std::ptrdiff_t>(i) + 4,
                                   [](char c) { return c >= '0' && c <= '7'; });
    if (octal) {
      out += static_cast<char>((text[i + 1] - '0') * 64 + (text[i + 2] - '0') * 8 +
                               (text[i + 3] - '0'));
      i += 3;
    } else {
      out += text[i];
    }
  }
  return out;
}

struct Mount {
  std::string root;  // the group that shows at `point`
  std::string point;
};

std::optional<Mount> find_mount(const std::string& process_dir, const std::string& controller) {
  const std::string_view type_field = controller.empty() ? " - cgroup2 " : " - cgroup ";
  std::ifstream file(process_dir + "/mountinfo");
  for (std::string line; std::getline(file, line);) {
    const std::size_t dash = line.find(type_field);
    if (dash == std::string::npos) continue;  // most lines: they cost no more than this
    std::istringstream head(line.substr(0, dash));
    std::istringstream tail(line.substr(dash + 3));
    std::string skipped, root, point, type, source, options;
    head >> skipped >> skipped >> skipped >> root >> point;
    tail >> type >> source >> options;
    if (controller.empty() || lists(options, controller))
      return Mount{unescape(root), unescape(point)};
  }
  return std::nullopt;
}

// The path in the line "id:controllers:/path" of the process's cgroup file.
std::optional<std::string> find_group(const std::string& process_dir,
                                      const std::string& controller) {
  std::ifstream file(process_dir + "/cgroup");
  for (std::string line; std::getline(file, line);) {
    const std::size_t first = line.find(':');
    if (first == std::string::npos) continue;
    const std::size_t second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string_view names = std::string_view(line).substr(first + 1, second - first - 1);
    const bool wanted =
        controller.empty() ? line.starts_with("0::") : !names.empty() && lists(names, controller);
    if (wanted) return line.substr(second + 1);
  }
  return std::nullopt;
}

// The group's path below the mount, without slashes at its ends; empty when it is not visible
// there.
std::string below_mount(const std::string& group, const std::string& mount_root) {
  const std::string root = mount_root == "/" ? "" : mount_root;
  if (!group.starts_with(root) || (group.size() > root.size() && group[root.size()] != '/'))
    return "";
  if (group.find("/..") != std::string::npos) return "";
  std::string below = group.substr(root.size());
  while (below.starts_with('/')) below.erase(0, 1);
  while (below.ends_with('/')) below.pop_back();
  return below;
}

void keep_least(std::optional<std::uint64_t>& least, std::uint64_t value) {
  least = std::min(least.value_or(value), value);
}

}  // namespace

std::vector<std::string> directories(const std::string& process_dir,
                                     const std::string& controller) {
  const std::optional<Mount> mount = find_mount(process_dir, controller);
  const std::optional<std::string> group = find_group(process_dir, controller);
  if (!mount || !group) return {};
  std::vector<std::string> found;
  std::string below = below_mount(*group, mount->root);
  while (!below.empty()) {
    const std::string directory = mount->point + "/" + below;
    std::error_code ignored;
    if (fs::is_directory(directory, ignored)) found.push_back(directory);
    const std::size_t slash = below.rfind('/');
    below.resize(slash == std::string::npos ? 0 : slash);
  }
  found.push_back(mount->point);
  return found;
}

std::optional<std::uint64_t> oom_kills_in(const std::string& file) {
  return read_key(file, "oom_kill");
}

std::optional<std::string> oom_file(const std::string& process_dir) {
  for (const std::string& directory : directories(process_dir, "memory")) {
    if (oom_kills_in(directory + "/memory.oom_control")) return directory + "/memory.oom_control";
  }
  for (const std::string& directory : directories(process_dir, "")) {
    if (oom_kills_in(directory + "/memory.events")) return directory + "/memory.events";
  }
  return std::nullopt;
}

std::optional<std::uint64_t> oom_kills(const std::string& process_dir) {
  const std::optional<std::string> file = oom_file(process_dir);
  return file ? oom_kills_in(*file) : std::nullopt;
}

std::optional<double> cpu_quota(const std::string& process_dir) {
  std::optional<double> least;
  const auto limit = [&least](std::optional<std::uint64_t> quota,
                              std::optional<std::uint64_t> period) {
    if (!quota || !period || *period == 0) return;
    const double cores = static_cast<double>(*quota) / static_cast<double>(*period);
    least = std::min(least.value_or(cores), cores);
  };
  for (const std::string& directory : directories(process_dir, "cpu")) {
    // An unlimited v1 quota is -1, which is no number here.
    limit(read_number(directory + "/cpu.cfs_quota_us"),
          read_number(directory + "/cpu.cfs_period_us"));
  }
  for (const std::string& directory : directories(process_dir, "")) {
    const std::vector<std::string> words = read_words(directory + "/cpu.max");
    if (words.size() == 2) limit(parse_number(words[0]), parse_number(words[1]));
  }
  return least;
}

std::optional<std::uint64_t> memory_left(const std::string& process_dir) {
  std::optional<std::uint64_t> least;
  const auto limit = [&least](const std::string& directory, const char* max_name,
                              const char* used_name, const std::string& prefix) {
    const std::optional<std::uint64_t> max = read_number(directory + max_name);
    const std::optional<std::uint64_t> used = read_number(directory + used_name);
    if (!max || !used || *max >= kUnlimited) return;
    const std::string stat = directory + "/memory.stat";
    const std::uint64_t cache = read_key(stat, prefix + "inactive_file").value_or(0) +
                                read_key(stat, prefix + "active_file").value_or(0);
    const std::uint64_t held = *used - std::min(*used, cache);
    keep_least(least, *max - std::min(*max, held));
  };
  for (const std::string& directory : directories(process_dir, "memory")) {
    limit(directory, "/memory.limit_in_bytes", "/memory.usage_in_bytes", "total_");
  }
  for (const std::string& directory : directories(process_dir, "")) {
    limit(directory, "/memory.max", "/memory.current", "");
  }
  return least;
}

}  // namespace simpler::cgroup
