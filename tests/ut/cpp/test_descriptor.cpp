#include "hierarchical/os/descriptor.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "child_process.h"

namespace simpler {
namespace {

using testing::ChildProcess;

constexpr int kCannotArrange = 77;  // exit code of a child that may not set up its test

bool is_dev_null(int fd) {
  struct stat info{};
  return fstat(fd, &info) == 0 && S_ISCHR(info.st_mode) && info.st_rdev == makedev(1, 3);
}

struct Inherited {
  std::string what;
  int fd;
  bool detached;
  bool close_on_exec;
};

// One descriptor of each kind. All are closed with the process.
std::vector<Inherited> open_all_kinds(const std::string& directory) {
  std::array<int, 2> pipe_ends{};
  std::array<int, 2> sockets{};
  EXPECT_EQ(pipe(pipe_ends.data()), 0);
  EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets.data()), 0);
  const std::string fifo = directory + "/fifo";
  EXPECT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  return {
      {"pipe, read end", pipe_ends[0], true, false},
      {"pipe, write end", pipe_ends[1], true, false},
      {"socket", sockets[0], true, true},
      {"TCP socket", socket(AF_INET, SOCK_STREAM, 0), true, false},
      {"eventfd", eventfd(0, EFD_CLOEXEC), true, true},
      {"epoll", epoll_create1(0), true, false},
      {"timerfd", timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC), true, true},
      {"inotify", inotify_init1(0), true, false},
      {"pidfd", open_pidfd(getpid()).value().release(), true, true},
      {"named FIFO", open(fifo.c_str(), O_RDWR | O_CLOEXEC), true, true},
      {"namespace", open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC), true, true},
      {"regular file", open((directory + "/file").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600),
       false, true},
      {"memfd", memfd_create("kept", MFD_CLOEXEC), false, true},
      {"directory", open(directory.c_str(), O_RDONLY | O_DIRECTORY), false, false},
      {"device", open("/dev/zero", O_RDWR | O_CLOEXEC), false, true},
  };
}

// The first of `all` that is not as it should be after detaching, or an empty text.
std::string first_wrong(const std::vector<Inherited>& all, int kept) {
  for (const Inherited& one : all) {
    const bool expected = one.detached && one.fd != kept;
    if (is_dev_null(one.fd) != expected)
      return one.what + (expected ? " was not detached" : " was detached");
    if (((fcntl(one.fd, F_GETFD) & FD_CLOEXEC) != 0) != one.close_on_exec)
      return one.what + " changed close-on-exec";
  }
  return "";
}

class DetachTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (std::filesystem::temp_directory_path() / "simpler-fds-XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    directory_ = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  // Runs `arrange` in a child that has one descriptor of each kind, detaches, and returns what is
  // wrong.
  std::string detach_in_child(const std::function<bool()>& arrange) {
    auto [ours, theirs] = make_socket_pair();
    ChildProcess child([&, &ours = ours, &theirs = theirs] {
      ours.reset();
      const std::vector<Inherited> all = open_all_kinds(directory_);
      if (!arrange()) return kCannotArrange;
      const std::array<int, 2> keep{theirs.get(), all[2].fd};
      detach_inherited_descriptors(keep);
      const std::string wrong = first_wrong(all, all[2].fd);
      return write(theirs.get(), wrong.data(), wrong.size()) == static_cast<ssize_t>(wrong.size())
                 ? 0
                 : 1;
    });
    theirs.reset();
    std::string text;
    std::array<char, 256> part{};
    for (ssize_t n = 0; (n = read(ours.get(), part.data(), part.size())) > 0;)
      text.append(part.data(), static_cast<std::size_t>(n));
    const ExitStatus status = child.finish();
    if (status.value == kCannotArrange) return "cannot arrange";
    EXPECT_EQ(describe_exit(status), "exited with code 0");
    return text;
  }

  std::string directory_;
};

bool cover_with_empty_file_system(const char* directory) {
  return unshare(CLONE_NEWNS) == 0 &&
         mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
         mount("tmpfs", directory, "tmpfs", 0, nullptr) == 0;
}

TEST(Descriptor, ClosesOnceAndMovesOwnership) {
  Descriptor first = make_event();
  const int fd = first.get();
  Descriptor second = std::move(first);
  EXPECT_EQ(second.get(), fd);
  {
    const Descriptor third = std::move(second);
    EXPECT_GE(fcntl(fd, F_GETFD), 0);
  }
  EXPECT_EQ(fcntl(fd, F_GETFD), -1);
  EXPECT_EQ(errno, EBADF);
}

TEST(Descriptor, AssignmentClosesTheOldOneAndKeepsErrno) {
  Descriptor target = make_event();
  const int old = target.get();
  errno = ENOSPC;
  target = Descriptor();
  EXPECT_EQ(errno, ENOSPC);
  EXPECT_FALSE(target.valid());
  EXPECT_EQ(fcntl(old, F_GETFD), -1);
}

TEST(Descriptor, PairsAndEventsCloseOnExec) {
  const auto [one, other] = make_socket_pair();
  const Descriptor event = make_event();
  for (const Descriptor* each : {&one, &other, &event})
    EXPECT_NE(fcntl(each->get(), F_GETFD) & FD_CLOEXEC, 0);
  EXPECT_NE(fcntl(event.get(), F_GETFL) & O_NONBLOCK, 0);
}

TEST_F(DetachTest, EachKindIsDetachedOrStaysAsPromised) {
  EXPECT_EQ(detach_in_child([] { return true; }), "");
}

TEST_F(DetachTest, WithoutProcTheFileSystemsTellTheKinds) {
  const std::string result = detach_in_child([] { return cover_with_empty_file_system("/proc"); });
  if (result == "cannot arrange") GTEST_SKIP() << "this process may not mount file systems";
  EXPECT_EQ(result, "");
}

TEST_F(DetachTest, WithoutDevNullThePeerStillNoticesAndTheNumberStaysTaken) {
  std::array<int, 2> ends{};
  ASSERT_EQ(pipe(ends.data()), 0);
  Descriptor reader(ends[0]);
  Descriptor writer(ends[1]);
  auto [ours, theirs] = make_socket_pair();
  ChildProcess child([&, &ours = ours, &theirs = theirs] {
    ours.reset();
    if (!cover_with_empty_file_system("/dev")) return kCannotArrange;
    const std::array<int, 1> keep{theirs.get()};
    detach_inherited_descriptors(keep);
    struct stat info{};
    return fstat(writer.get(), &info) == 0 && S_ISDIR(info.st_mode) ? 0 : 1;
  });
  const ExitStatus status = child.finish();
  if (status.value == kCannotArrange) GTEST_SKIP() << "this process may not mount file systems";
  EXPECT_EQ(describe_exit(status), "exited with code 0");
}

TEST_F(DetachTest, AFullDescriptorTableIsDetachedToo) {
  std::array<int, 2> ends{};
  ASSERT_EQ(pipe(ends.data()), 0);
  Descriptor reader(ends[0]);
  Descriptor writer(ends[1]);
  ChildProcess child([] {
    const rlimit few{64, 64};
    setrlimit(RLIMIT_NOFILE, &few);
    std::array<int, 2> more{};
    while (pipe(more.data()) == 0) {
    }
    while (eventfd(0, 0) >= 0) {
    }
    detach_inherited_descriptors({});
    int still_attached = 0;
    for (int fd = 3; fd < 64; ++fd) {
      struct stat info{};
      if (fstat(fd, &info) == 0 && S_ISFIFO(info.st_mode)) ++still_attached;
      if (fstat(fd, &info) != 0) return 99;  // a number became free
    }
    return still_attached;
  });
  EXPECT_EQ(child.finish_and_describe(), "exited with code 0");
}

TEST_F(DetachTest, AReaderSeesTheEndWhenTheParentClosesThoughTheChildLives) {
  std::array<int, 2> ends{};
  ASSERT_EQ(pipe2(ends.data(), O_CLOEXEC), 0);
  Descriptor reader(ends[0]);
  Descriptor writer(ends[1]);
  auto [ours, theirs] = make_socket_pair();
  ChildProcess child([&ours = ours, &theirs = theirs] {
    ours.reset();
    const std::array<int, 1> keep{theirs.get()};
    detach_inherited_descriptors(keep);
    char byte = 0;
    return read(theirs.get(), &byte, 1) == 0 ? 0 : 1;
  });
  writer.reset();
  pollfd watched{reader.get(), POLLIN, 0};
  ASSERT_EQ(poll(&watched, 1, 60'000), 1);
  char byte = 0;
  EXPECT_EQ(read(reader.get(), &byte, 1), 0);
  EXPECT_FALSE(wait_process_end(child.pidfd(), Deadline::at(0)));
  ours.reset();
  EXPECT_EQ(child.finish_and_describe(), "exited with code 0");
}

}  // namespace
}  // namespace simpler
