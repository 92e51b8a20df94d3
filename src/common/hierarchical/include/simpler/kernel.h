/* The C ABI of native kernels: `int kernel(const simpler_kernel_args *args)`, 0 for success.
 *
 * On failure return non-zero and write a message to `error` (at most `error_bytes` including the NUL).
 * The arrays and strings are valid during the call only. Fields are only ever appended: check
 * `struct_size` before using one that this header marks as newer than the library's minimum.
 */
#ifndef SIMPLER_KERNEL_H
#define SIMPLER_KERNEL_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SIMPLER_KERNEL_ABI_VERSION 1u

typedef enum simpler_tag { SIMPLER_IN = 1, SIMPLER_OUT = 2, SIMPLER_INOUT = 3, SIMPLER_NO_DEP = 4 } simpler_tag;

typedef enum simpler_dtype {
  SIMPLER_BOOL = 0, SIMPLER_INT8 = 1, SIMPLER_UINT8 = 2, SIMPLER_INT16 = 3, SIMPLER_UINT16 = 4,
  SIMPLER_INT32 = 5, SIMPLER_UINT32 = 6, SIMPLER_INT64 = 7, SIMPLER_UINT64 = 8, SIMPLER_FLOAT16 = 9,
  SIMPLER_FLOAT32 = 10, SIMPLER_FLOAT64 = 11, SIMPLER_COMPLEX64 = 12, SIMPLER_COMPLEX128 = 13,
  SIMPLER_BFLOAT16 = 14, SIMPLER_FLOAT8_E4M3 = 15, SIMPLER_FLOAT8_E5M2 = 16
} simpler_dtype;

typedef enum simpler_scalar_kind { SIMPLER_SCALAR_BOOL = 0, SIMPLER_SCALAR_INT64 = 1, SIMPLER_SCALAR_FLOAT64 = 2 } simpler_scalar_kind;

typedef struct {
  void *data;                     /* first element, in this process */
  int64_t nbytes;                 /* bytes from data that the view spans */
  const int64_t *shape, *strides; /* ndim entries; strides in bytes */
  int32_t ndim, dtype, tag, reserved;
} simpler_tensor;

typedef struct {
  int32_t kind, reserved;
  union { int64_t i; double f; } v; /* bool: i is 0 or 1 */
} simpler_scalar;

typedef struct {
  uint32_t struct_size, abi_version;
  int32_t device_id;
  uint32_t num_tensors, num_scalars;
  const simpler_tensor *tensors;
  const simpler_scalar *scalars;
  void *stream;                   /* the platform's queue; NULL on cpu */
  char *error;
  size_t error_bytes;
} simpler_kernel_args;

typedef int (*simpler_kernel_fn)(const simpler_kernel_args *args);

#ifdef __cplusplus
}
#endif
#endif
