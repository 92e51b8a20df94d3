// Forks one child of a tree: what happens between fork() and the child's own entry function.
//
// Thread safety: one thread at a time.
// Fork: this is the fork. Nothing of ours may run in the child but what spawn_child calls.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "hierarchical/os/life_mark.h"
#include "hierarchical/os/process.h"
#include "hierarchical/os/shared_region.h"

namespace simpler {

// What the language runtime must do around fork(); each may be empty.
struct ForkHooks {
  std::function<void()> before;
  std::function<void()> after_in_parent;
  std::function<void()> after_in_child;
};

struct ChildPlan {
  std::string process_name;                      // shown by ps and top, cut to 15 bytes
  std::span<const SharedRegion* const> regions;  // all others become inaccessible in the child
  std::vector<int> descriptors;                  // stay open besides files and the standard three
  int parent_pidfd = -1;                         // the child ends when this process does
  bool watch_parent = true;                      // by a thread; the spare watches in its own loop
  LifeMark* life = nullptr;                      // held by the child's main thread to its end
};

// Returns the child's pid in the parent. In the child runs `entry` and leaves with _exit(what it
// returned); what it throws ends the child with kChildThrew. Throws Error{kSystem} when fork fails.
pid_t spawn_child(const ForkHooks& hooks, const ChildPlan& plan, const std::function<int()>& entry);

inline constexpr int kChildThrew = 70;
inline constexpr int kParentDied = 71;

}  // namespace simpler
