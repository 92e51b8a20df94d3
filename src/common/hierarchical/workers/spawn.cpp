#include "hierarchical/workers/spawn.h"

#include <cstdio>
#include <exception>

#include "hierarchical/os/thread.h"

namespace simpler {

namespace {

// One thread sleeps in poll on the parent's pidfd. PR_SET_PDEATHSIG would fire when the thread that
// forked ends, and a handler in Python would need the GIL; this needs neither.
void start_parent_watch(int parent_pidfd) {
  start_quiet_thread("simpler-parent", [parent_pidfd] {
    wait_process_end(parent_pidfd, Deadline::never());
    exit_now(kParentDied);
  }).detach();
}

[[noreturn]] void run_child(const ForkHooks& hooks, const ChildPlan& plan,
                            const std::function<int()>& entry) {
  int code = kChildThrew;
  try {
    if (plan.life != nullptr) plan.life->hold();
    reset_child_signals();
    if (plan.watch_parent) start_parent_watch(plan.parent_pidfd);
    if (hooks.after_in_child) hooks.after_in_child();
    seal_regions_except(plan.regions);
    detach_inherited_descriptors(plan.descriptors);
    set_process_name(plan.process_name);
    code = entry();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "simpler: child %s: %s\n", plan.process_name.c_str(), error.what());
  } catch (...) {
    std::fprintf(stderr, "simpler: child %s: unknown exception\n", plan.process_name.c_str());
  }
  std::fflush(nullptr);
  exit_now(code);
}

}  // namespace

pid_t spawn_child(const ForkHooks& hooks, const ChildPlan& plan,
                  const std::function<int()>& entry) {
  std::fflush(nullptr);  // or the child would write the parent's unwritten bytes once more
  if (hooks.before) hooks.before();
  pid_t pid = -1;
  try {
    pid = fork_process();
  } catch (...) {
    if (hooks.after_in_parent) hooks.after_in_parent();
    throw;
  }
  if (pid == 0) run_child(hooks, plan, entry);
  if (hooks.after_in_parent) hooks.after_in_parent();
  return pid;
}

}  // namespace simpler
