// Sixteen floats at a time, V16, and the three cell types a KV cache may hold.
#pragma once
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

// Sums must live in registers: loops over rows and vectors are unrolled before anything else.
#define VT_UNROLL _Pragma("GCC unroll 16")

namespace vt {

static inline float float_of_bf16(uint16_t x) {
  const uint32_t u = uint32_t(x) << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}

}  // namespace vt

#ifdef VT_AVX512
#include "vec_avx512.h"
#else
#include "vec_avx2.h"
#endif
