// A stack of its own that the scheduler enters and leaves: one thread of a model.
//
// Thread safety: none; a model runs in one operating-system thread.
// Sanitizers are told of each switch, so that a model runs under them unchanged.
#pragma once

#include <ucontext.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

namespace simpler::model {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

class Fiber {
 public:
  using Entry = void (*)(void* argument);

  // The context that runs already: what the others return to.
  Fiber() {
#if defined(__SANITIZE_THREAD__)
    tsan_ = __tsan_get_current_fiber();
#endif
  }

  // `entry` runs at the first switch and must never return.
  Fiber(Entry entry, void* argument)
      : stack_(new std::byte[kStackBytes]), entry_(entry), argument_(argument) {
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack_.get();
    context_.uc_stack.ss_size = kStackBytes;
    context_.uc_link = nullptr;
#if defined(__SANITIZE_ADDRESS__)
    bottom_ = stack_.get();
    size_ = kStackBytes;
#endif
    const auto self = reinterpret_cast<std::uintptr_t>(this);
    // makecontext passes ints only.
    makecontext(&context_, reinterpret_cast<void (*)()>(&Fiber::trampoline), 2,
                static_cast<unsigned>(self >> 32U), static_cast<unsigned>(self));
#if defined(__SANITIZE_THREAD__)
    tsan_ = __tsan_create_fiber(0);
#endif
  }

  ~Fiber() {
#if defined(__SANITIZE_THREAD__)
    if (stack_ != nullptr) __tsan_destroy_fiber(tsan_);
#endif
  }
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Returns when some fiber switches back to this one.
  void switch_to(Fiber& next) {
#if defined(__SANITIZE_ADDRESS__)
    void* fake_stack = nullptr;
    next.came_from_ = this;
    __sanitizer_start_switch_fiber(&fake_stack, next.bottom_, next.size_);
    swapcontext(&context_, &next.context_);
    arrived(fake_stack);
#elif defined(__SANITIZE_THREAD__)
    __tsan_switch_to_fiber(next.tsan_, 0);
    swapcontext(&context_, &next.context_);
#else
    swapcontext(&context_, &next.context_);
#endif
  }

 private:
  static constexpr std::size_t kStackBytes = 256 * 1024;

  static void trampoline(unsigned high, unsigned low) {
    auto* self = reinterpret_cast<Fiber*>((static_cast<std::uintptr_t>(high) << 32U) | low);
#if defined(__SANITIZE_ADDRESS__)
    self->arrived(nullptr);
#endif
    self->entry_(self->argument_);
  }

#if defined(__SANITIZE_ADDRESS__)
  void arrived(void* fake_stack) {
    // What was left is the stack of the fiber that switched here: the only way to learn the first
    // one's bounds.
    __sanitizer_finish_switch_fiber(fake_stack, &came_from_->bottom_, &came_from_->size_);
  }
  const void* bottom_ = nullptr;
  std::size_t size_ = 0;
  Fiber* came_from_ = nullptr;
#endif
#if defined(__SANITIZE_THREAD__)
  void* tsan_ = nullptr;
#endif
  ucontext_t context_{};
  std::unique_ptr<std::byte[]> stack_;
  Entry entry_ = nullptr;
  void* argument_ = nullptr;
};

}  // namespace simpler::model
