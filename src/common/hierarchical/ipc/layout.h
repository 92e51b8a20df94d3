// Every byte that a parent and its children agree on, as structs.
//
// One control region per tree holds a TreeHeader and one ChildBlock a child. It is committed at
// init, so touching it never fails. Payloads too large for a slot lie in a second, sparse region:
// per child a half for requests (the parent allocates) and a half for replies (the child
// allocates); offsets count from that region's start, so that a broadcast's request is staged once
// and read by all.
//
// What a child writes is untrusted: the parent checks every length and offset against its own
// figures. The Atom parameter lets tests run the protocols under a scheduler that explores
// interleavings.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace simpler {

inline constexpr std::uint32_t kLayoutVersion = 6;
inline constexpr std::size_t kCacheLine = 64;
inline constexpr int kControlSlots = 24;
inline constexpr int kLifecycleSlot =
    kControlSlots - 1;  // START and STOP only: there is always room for them
inline constexpr std::uint32_t kRingBit = 1U
                                          << 24;  // in the main bell: the task ring has a new entry
inline constexpr std::size_t kSlotInlineBytes = 8192 + 40;
inline constexpr int kTaskSlots = 64;
inline constexpr std::size_t kTaskInlineBytes = 1024;
inline constexpr std::uint64_t kInline =
    ~std::uint64_t{0};  // as an offset: the payload is in the slot

static_assert(std::atomic<std::uint32_t>::is_always_lock_free);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

// A set of bits that its owner sleeps on (bell.h).
template <template <typename> class Atom = std::atomic>
struct alignas(kCacheLine) Bell {
  Atom<std::uint32_t> pending{0};  // futex word; ringers set bits, the owner takes all
  alignas(kCacheLine) Atom<std::uint32_t> sleepers{0};  // threads in or about to enter futex_wait
};

enum class SlotState : std::uint32_t {
  kIdle,            // the parent's to fill
  kPostedMain,      // for Lane::kMain: the child may claim it, the parent may withdraw it
  kPostedService,   // for Lane::kService, likewise
  kPostedTransfer,  // for Lane::kTransfer, likewise
  kPostedAny,       // for Lane::kAny, likewise
  kRunning,         // claimed
  kReplied,         // the reply fields are valid
  kAbandoned,       // claimed, and nobody waits for the reply any more
  kLate,            // abandoned, and the handler has ended (or died): free to reclaim
  kPeerGone,        // the child is reaped or the tree is closing: no reply will come
};

enum class Lane : std::uint8_t {
  kMain,      // exclusive: between tasks on the child's main thread
  kService,   // concurrent: on a service thread, so many at once
  kTransfer,  // on a service thread, however many there are
  kAny,       // answered in C++ by whichever thread is free first
};

enum class ReplyStatus : std::uint32_t {
  kOk,
  kFailure,       // the payload is an encoded failure (error_codec.h)
  kNoReplySpace,  // the reply arena stayed full until the deadline
  kTooLarge,      // the reply is larger than the arena can ever hold
};

inline constexpr std::uint8_t kNotifyAsync =
    1;  // ControlSlot::flags: ring the tree's bell when replied

template <template <typename> class Atom = std::atomic>
struct alignas(kCacheLine) ControlSlot {
  Atom<std::uint32_t> state{0};   // SlotState; futex word; publishes all fields below
  Atom<std::uint32_t> waiter{0};  // non-zero while a parent thread sleeps on state
  std::uint16_t op = 0;           // parent writes while kIdle, like all of the request
  Lane lane = Lane::kMain;
  std::uint8_t flags = 0;
  std::uint32_t status = 0;  // ReplyStatus; child writes while kRunning, like all of the reply
  // Never reused. Atomic, since the child also reads it of slots that it has not claimed.
  Atom<std::uint64_t> request_id{0};
  std::uint64_t reply_id = 0;       // the request_id that the reply answers
  std::uint64_t request_bytes = 0;  // meta, then payload
  std::uint64_t request_offset = kInline;
  std::uint64_t reply_bytes = 0;
  std::uint64_t reply_offset = kInline;
  // second line
  std::uint32_t arg = 0;             // EXTENSION: its id
  std::uint32_t meta_bytes = 0;      // how much of the request comes before the payload
  std::int64_t deadline_ns = 0;      // CLOCK_MONOTONIC: how long the child may wait for reply space
  Atom<std::int64_t> started_ns{0};  // child: when it claimed the slot
  std::byte bytes[kSlotInlineBytes];  // the request, then the reply
};

enum class TaskStatus : std::uint32_t { kNone, kDone, kFailed, kSkipped };
// TaskSlot::flags
inline constexpr std::uint32_t kTaskSkip = 1;   // a task it follows has failed
inline constexpr std::uint32_t kTaskClaim = 2;  // the child claims it, so that it can be taken back
inline constexpr std::uint32_t kTaskTimed = 4;  // somebody wants to know when it ended

template <template <typename> class Atom = std::atomic>
struct alignas(kCacheLine) TaskSlot {
  std::uint64_t seq =
      0;  // from 1; parent writes before TaskRing::published covers it, like the next five
  // Bit i: entry seq - 1 - i; the child skips this one when any of them did not succeed.
  std::uint64_t after_mask = 0;
  std::uint32_t callable_id = 0;
  std::uint32_t flags = 0;
  std::uint64_t args_bytes = 0;
  std::uint64_t args_offset = kInline;
  // Parent, at any time: seq, when the entry is to be skipped unless it has begun. With kTaskClaim
  // either side changes it from 0, and whoever comes first has its way.
  Atom<std::uint64_t> recalled{0};
  std::uint64_t reserved[2] = {};
  // second line: child writes before TaskRing::completed covers it
  std::uint32_t status = 0;  // TaskStatus
  std::uint32_t reserved2 = 0;
  std::uint64_t result_bytes = 0;
  std::uint64_t result_offset = kInline;
  Atom<std::int64_t> started_ns{0};   // CLOCK_MONOTONIC
  std::byte bytes[kTaskInlineBytes];  // the arguments, then the result
  Atom<std::int64_t> ended_ns{0};     // with kTaskTimed; at the end, since few entries touch it
};

// Tasks run in order, so two counters say everything.
template <template <typename> class Atom = std::atomic>
struct TaskRing {
  alignas(kCacheLine) Atom<std::uint64_t> published{0};  // parent: entries 1..published are filled
  Atom<std::uint64_t> retired{0};  // parent: results up to here have been read
  Atom<std::uint64_t> wake_at{0};  // parent: who sleeps on all rings need not hear of ends before
  alignas(kCacheLine) Atom<std::uint64_t> completed{0};  // child: entries 1..completed have ended
  Atom<std::uint64_t> begun{0};  // child: completed, or completed + 1 while one runs
  alignas(kCacheLine) Atom<std::uint32_t> event{
      0};                          // futex word: changes at each completion and at death
  Atom<std::uint32_t> waiters{0};  // parent threads asleep on event
  TaskSlot<Atom> slots[kTaskSlots];
};

// A counter that sleepers wait on for something to be released.
template <template <typename> class Atom = std::atomic>
struct alignas(kCacheLine) ReleaseEvent {
  Atom<std::uint32_t> count{0};  // futex word
  Atom<std::uint32_t> waiters{0};
};

template <template <typename> class Atom = std::atomic>
struct alignas(4096) ChildBlock {
  std::uint32_t layout_version = kLayoutVersion;
  Bell<Atom> main_bell;                                  // bit i: control slot i; kRingBit
  Bell<Atom> service_bell;                               // bit i: control slot i
  alignas(kCacheLine) Atom<std::uint32_t> main_busy{0};  // the main thread runs a task or a handler
  ReleaseEvent<Atom> slots_released;                     // a control slot came back to the parent
  ReleaseEvent<Atom> replies_released;  // the parent has read a reply out of the arena
  TaskRing<Atom> ring;
  ControlSlot<Atom> slots[kControlSlots];
};

template <template <typename> class Atom = std::atomic>
struct alignas(4096) TreeHeader {
  std::uint32_t layout_version = kLayoutVersion;
  std::uint32_t spin_limit = 0;                         // spinners allowed at once; 0: never spin
  alignas(kCacheLine) Atom<std::uint64_t> spinners{0};  // a bit each (spin.h)
  Bell<Atom> async_bell;  // bit 0: something ended that no thread waits for
  // Changes when a task of any ring ends while somebody sleeps here (task_protocol.h).
  ReleaseEvent<Atom> tasks_ended;
};

static_assert(std::is_standard_layout_v<ControlSlot<>>);
static_assert(std::is_standard_layout_v<TaskSlot<>>);
static_assert(std::is_standard_layout_v<ChildBlock<>>);
static_assert(offsetof(ControlSlot<>, arg) == kCacheLine,
              "the words of a small call share two lines");
static_assert(sizeof(ControlSlot<>) % kCacheLine == 0);
static_assert(offsetof(TaskSlot<>, status) == kCacheLine);
static_assert(kTaskSlots <= 64, "the last kTaskSlots entries have a bit each in after_mask");

}  // namespace simpler
