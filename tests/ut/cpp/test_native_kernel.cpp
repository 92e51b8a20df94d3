#include "hierarchical/workers/native_kernel.h"

#include <array>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "hierarchical/base/error.h"
#include "hierarchical/ipc/task_codec.h"
#include "wire_mangler.h"

namespace simpler {
namespace {

std::vector<std::byte> encode(const std::vector<TaskItem>& items) { return encode_task(items); }

int do_nothing(const simpler_kernel_args*) { return 0; }

// out[i] = in[i] * factor over float32, the tensors and the scalar checked as a kernel would.
int scale(const simpler_kernel_args* args) {
  if (args->struct_size < sizeof *args || args->abi_version != SIMPLER_KERNEL_ABI_VERSION) return 1;
  if (args->num_tensors != 2 || args->num_scalars != 3 || args->device_id != 4 ||
      args->stream != nullptr)
    return 2;
  const simpler_tensor& in = args->tensors[0];
  const simpler_tensor& out = args->tensors[1];
  if (in.ndim != 1 || in.strides[0] != 4 || in.dtype != SIMPLER_FLOAT32 || in.tag != SIMPLER_IN)
    return 3;
  if (out.tag != SIMPLER_OUT || out.nbytes != in.nbytes || in.reserved != 0) return 4;
  if (args->scalars[0].kind != SIMPLER_SCALAR_BOOL || args->scalars[0].v.i != 1) return 5;
  if (args->scalars[1].kind != SIMPLER_SCALAR_INT64 || args->scalars[1].v.i != -9) return 6;
  if (args->scalars[2].kind != SIMPLER_SCALAR_FLOAT64) return 7;
  for (std::int64_t i = 0; i < in.shape[0]; ++i) {
    static_cast<float*>(out.data)[i] =
        static_cast<float*>(in.data)[i] * static_cast<float>(args->scalars[2].v.f);
  }
  return 0;
}

int fail_with_text(const simpler_kernel_args* args) {
  std::strncpy(args->error, "no such block", args->error_bytes);
  return 12;
}

int fail_without_text(const simpler_kernel_args*) { return -3; }

int fail_without_nul(const simpler_kernel_args* args) {
  std::memset(args->error, 'x', args->error_bytes);
  return 1;
}

int succeed_with_text(const simpler_kernel_args* args) {
  std::strncpy(args->error, "left behind", args->error_bytes);
  return 0;
}

int throw_out(const simpler_kernel_args*) { throw std::runtime_error("index 9 of 3"); }

int sum_of_extents(const simpler_kernel_args* args) {
  std::int64_t sum = 0;
  for (std::uint32_t i = 0; i < args->num_tensors; ++i) {
    for (std::int32_t dim = 0; dim < args->tensors[i].ndim; ++dim) {
      sum += args->tensors[i].shape[dim] + args->tensors[i].strides[dim];
    }
  }
  return static_cast<int>(sum);
}

TEST(NativeKernel, ComputesOnItsTensorsAndScalars) {
  std::array<float, 3> in{1, 2, 3};
  std::array<float, 3> out{};
  const auto tensor = [](std::array<float, 3>& data, std::int32_t tag) {
    return TensorArg{
        reinterpret_cast<std::uintptr_t>(data.data()), sizeof data, {3}, {4}, SIMPLER_FLOAT32, tag};
  };
  const KernelOutcome outcome = call_native_kernel(
      &scale,
      encode({tensor(in, SIMPLER_IN), true, std::int64_t{-9}, tensor(out, SIMPLER_OUT), 2.0}), 4);
  EXPECT_EQ(outcome.code, 0) << outcome.message;
  EXPECT_EQ(outcome.message, "");
  EXPECT_EQ(out, (std::array<float, 3>{2, 4, 6}));
}

TEST(NativeKernel, AWireAtAnOddAddressIsReadTheSame) {
  const std::vector<std::byte> wire =
      encode({TensorArg{0, 24, {2, 3}, {12, 4}, SIMPLER_FLOAT32, SIMPLER_IN}});
  for (std::size_t shift = 0; shift < 8; ++shift) {
    std::vector<std::byte> moved(shift);
    moved.insert(moved.end(), wire.begin(), wire.end());
    EXPECT_EQ(call_native_kernel(&sum_of_extents, std::span(moved).subspan(shift), 0).code, 21)
        << shift;
  }
}

TEST(NativeKernel, AFailureHasTheKernelsOwnText) {
  const KernelOutcome outcome = call_native_kernel(&fail_with_text, encode({}), 0);
  EXPECT_EQ(outcome.code, 12);
  EXPECT_EQ(outcome.message, "no such block");
}

TEST(NativeKernel, AFailureWithoutTextNamesTheNumberAndNeverAnOlderText) {
  call_native_kernel(&succeed_with_text, encode({}), 0);
  call_native_kernel(&fail_with_text, encode({}), 0);
  EXPECT_EQ(call_native_kernel(&fail_without_text, encode({}), 0).message, "kernel returned -3");
}

TEST(NativeKernel, ATextWithoutItsNulEndsWithTheBuffer) {
  const KernelOutcome outcome = call_native_kernel(&fail_without_nul, encode({}), 0);
  EXPECT_EQ(outcome.message, std::string(16 * 1024 - 1, 'x'));
}

TEST(NativeKernel, TextWithSuccessIsNotRead) {
  const KernelOutcome outcome = call_native_kernel(&succeed_with_text, encode({}), 0);
  EXPECT_EQ(outcome.code, 0);
  EXPECT_EQ(outcome.message, "");
}

TEST(NativeKernel, ACxxExceptionIsAFailure) {
  const KernelOutcome outcome = call_native_kernel(&throw_out, encode({}), 0);
  EXPECT_NE(outcome.code, 0);
  EXPECT_EQ(outcome.message, "kernel threw a C++ exception: index 9 of 3");
}

TEST(NativeKernel, ThreadsCallAtOnceWithoutSharingTheirArguments) {
  std::vector<std::thread> threads;
  std::array<bool, 4> good{};
  for (std::int64_t i = 0; i < 4; ++i) {
    threads.emplace_back([i, &good] {
      const std::vector<std::byte> wire =
          encode({TensorArg{0, 0, {i}, {1}, SIMPLER_INT8, SIMPLER_IN}});
      bool all = true;
      for (int round = 0; round < 1'000; ++round)
        all &= call_native_kernel(&sum_of_extents, wire, 0).code == i + 1;
      good[static_cast<std::size_t>(i)] = all;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(good, (std::array<bool, 4>{true, true, true, true}));
}

TEST(NativeKernel, DamagedWiresNeverReachTheKernel) {
  const std::vector<TaskItem> items{
      TensorArg{0x1000, 96, {2, 3}, {48, 4}, SIMPLER_FLOAT32, SIMPLER_IN}, true, 0.5};
  testing::expect_no_damage_gets_through(encode_task(items), [](std::span<const std::byte> wire) {
    call_native_kernel(&do_nothing, wire, 0);
  });
}

}  // namespace
}  // namespace simpler
