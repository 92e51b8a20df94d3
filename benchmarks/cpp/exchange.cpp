// The floor: a request and a reply between a parent and its children over shared memory, with
// nothing else. No ids, deadlines, liveness or Python.
//
// exchange MODE PATTERN BYTES CHILDREN COUNT BATCH PACE_NS
//   MODE     spin: both ends spin; futex: both ends sleep at once and are woken by a system call
//   PATTERN  call: one child after another; broadcast: all children, then wait for all
//   COUNT    samples; each is the time of BATCH exchanges, after PACE_NS of sleep
// Writes the samples to standard output as native 64-bit nanoseconds.
#include <linux/futex.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

namespace {

struct Slot {
  alignas(64) std::atomic<std::uint32_t> request{0};  // futex word: number of requests so far
  alignas(64) std::atomic<std::uint32_t> reply{0};    // futex word: number of replies so far
  alignas(64) std::byte bytes[std::size_t{64} << 10];
};

struct Options {
  bool futex;
  bool broadcast;
  std::size_t nbytes;
  std::size_t children;
  std::size_t count;
  std::size_t batch;
  std::int64_t pace_ns;
};

std::int64_t now() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return std::int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

void wait_for(std::atomic<std::uint32_t>& word, std::uint32_t value, bool futex) {
  for (;;) {
    const std::uint32_t seen = word.load(std::memory_order_acquire);
    if (seen == value) return;
    if (futex) {
      syscall(SYS_futex, &word, FUTEX_WAIT, seen, nullptr, nullptr, 0);
    } else {
      __builtin_ia32_pause();
    }
  }
}

void post(std::atomic<std::uint32_t>& word, std::uint32_t value, bool futex) {
  word.store(value, std::memory_order_release);
  if (futex) syscall(SYS_futex, &word, FUTEX_WAKE, 1, nullptr, nullptr, 0);
}

[[noreturn]] void serve(Slot& slot, const Options& options) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  std::vector<std::byte> own(options.nbytes);
  for (std::uint32_t number = 1;; ++number) {
    wait_for(slot.request, number, options.futex);
    std::memcpy(own.data(), slot.bytes, options.nbytes);
    std::memcpy(slot.bytes, own.data(), options.nbytes);
    post(slot.reply, number, options.futex);
  }
}

class Parent {
 public:
  Parent(Slot* slots, const Options& options)
      : slots_(slots),
        options_(options),
        numbers_(options.children, 0),
        own_(options.nbytes, std::byte{1}) {}

  void exchange() {
    if (options_.broadcast) {
      for (std::size_t child = 0; child < options_.children; ++child) send(child);
      for (std::size_t child = 0; child < options_.children; ++child) receive(child);
      return;
    }
    send(next_);
    receive(next_);
    next_ = next_ + 1 == options_.children ? 0 : next_ + 1;
  }

 private:
  void send(std::size_t child) {
    std::memcpy(slots_[child].bytes, own_.data(), options_.nbytes);
    post(slots_[child].request, ++numbers_[child], options_.futex);
  }
  void receive(std::size_t child) {
    wait_for(slots_[child].reply, numbers_[child], options_.futex);
    std::memcpy(own_.data(), slots_[child].bytes, options_.nbytes);
  }

  Slot* slots_;
  const Options& options_;
  std::vector<std::uint32_t> numbers_;
  std::vector<std::byte> own_;
  std::size_t next_ = 0;
};

std::vector<std::int64_t> measure(Parent& parent, const Options& options) {
  const std::size_t warm_up = options.pace_ns == 0 ? 1000 : 8;
  for (std::size_t i = 0; i < warm_up; ++i) parent.exchange();
  std::vector<std::int64_t> samples(options.count);
  const timespec pace{options.pace_ns / 1'000'000'000, options.pace_ns % 1'000'000'000};
  for (std::int64_t& sample : samples) {
    if (options.pace_ns > 0) clock_nanosleep(CLOCK_MONOTONIC, 0, &pace, nullptr);
    const std::int64_t start = now();
    for (std::size_t i = 0; i < options.batch; ++i) parent.exchange();
    sample = now() - start;
  }
  return samples;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 8) {
    std::fprintf(stderr, "usage: %s MODE PATTERN BYTES CHILDREN COUNT BATCH PACE_NS\n", argv[0]);
    return 2;
  }
  const auto number = [&](int i) { return static_cast<std::size_t>(std::stoull(argv[i])); };
  const Options options{std::string_view(argv[1]) == "futex",
                        std::string_view(argv[2]) == "broadcast",
                        number(3),
                        number(4),
                        number(5),
                        number(6),
                        static_cast<std::int64_t>(number(7))};
  if (options.nbytes > sizeof(Slot::bytes)) return 2;
  void* memory = mmap(nullptr, options.children * sizeof(Slot), PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return 1;
  Slot* slots = static_cast<Slot*>(memory);
  std::vector<pid_t> pids;
  for (std::size_t child = 0; child < options.children; ++child) {
    Slot* slot = new (slots + child) Slot;
    const pid_t pid = fork();
    if (pid == 0) serve(*slot, options);
    if (pid < 0) return 1;
    pids.push_back(pid);
  }
  Parent parent(slots, options);
  const std::vector<std::int64_t> samples = measure(parent, options);
  for (const pid_t pid : pids) kill(pid, SIGKILL);
  const bool written =
      std::fwrite(samples.data(), sizeof samples[0], samples.size(), stdout) == samples.size();
  return written ? 0 : 1;
}
