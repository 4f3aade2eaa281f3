// Sixteen floats as a pair of AVX2 registers; included by vec.h.
//
// A bfloat16 vector is kept with its even elements in `a` and its odd ones in `b`: that costs one
// shift and one mask for sixteen values, against four shuffles for the natural order. `ordered`
// restores the order once a sum over many such vectors is complete.
#pragma once
#define VT_VARIANT "avx2"

namespace vt {

struct V16 {
  __m256 a, b;
};

static inline V16 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline V16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline V16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void store(float* p, V16 x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
static inline V16 add(V16 x, V16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
static inline V16 sub(V16 x, V16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
static inline V16 mul(V16 x, V16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
static inline V16 div(V16 x, V16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
static inline V16 max(V16 x, V16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
static inline V16 min(V16 x, V16 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
static inline V16 fma(V16 x, V16 y, V16 z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}

// One scalar against sixteen values: the scalar is broadcast from memory once.
struct S1 {
  __m256 v;
};
static inline S1 broadcast(const float* p) { return {_mm256_broadcast_ss(p)}; }
static inline V16 fma(S1 s, V16 y, V16 z) {
  return {_mm256_fmadd_ps(s.v, y.a, z.a), _mm256_fmadd_ps(s.v, y.b, z.b)};
}

// Register control for the inner loops, which use all 16 registers. Left alone, gcc keeps
// broadcasts for later, or reads a vector from memory once per row, and spills a sum for it: less
// than half the speed. `volatile` keeps these in the order they are written.
static inline S1 broadcast_here(const float* p) {
  __m256 v;
  asm volatile("vbroadcastss %1, %0" : "=x"(v) : "m"(*p));
  return {v};
}
static inline __m256 pinned(__m256 x) {
  asm volatile("" : "+x"(x));
  return x;
}

static inline float hsum(V16 x) {
  __m256 s = _mm256_add_ps(x.a, x.b);
  __m128 t = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  t = _mm_add_ps(t, _mm_movehl_ps(t, t));
  return _mm_cvtss_f32(_mm_add_ss(t, _mm_movehdup_ps(t)));
}
static inline float hmax(V16 x) {
  __m256 s = _mm256_max_ps(x.a, x.b);
  __m128 t = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  t = _mm_max_ps(t, _mm_movehl_ps(t, t));
  return _mm_cvtss_f32(_mm_max_ss(t, _mm_movehdup_ps(t)));
}

// Permutations that bring the set lanes of an 8-bit mask to the front.
struct CompressTable {
  uint64_t lanes[256];
  constexpr CompressTable() : lanes() {
    for (int m = 0; m < 256; m++) {
      uint64_t packed = 0;
      int n = 0;
      for (int i = 0; i < 8; i++)
        if (m >> i & 1) packed |= uint64_t(i) << 8 * n++;
      lanes[m] = packed;
    }
  }
};
static constexpr CompressTable kCompress;

static inline __m256 compress8(__m256 x, unsigned mask) {
  __m128i idx = _mm_loadl_epi64((const __m128i*)&kCompress.lanes[mask]);
  return _mm256_permutevar8x32_ps(x, _mm256_cvtepu8_epi32(idx));
}
// Store the lanes of `x` that are set in `mask`, packed. Writes up to 16 floats whatever the mask.
static inline void compress_store(float* p, V16 x, unsigned mask) {
  _mm256_storeu_ps(p, compress8(x.a, mask & 255));
  _mm256_storeu_ps(p + __builtin_popcount(mask & 255), compress8(x.b, mask >> 8));
}

static inline __m256 exp8(__m256 x) {
  const __m256 low = _mm256_set1_ps(-87.3f);
  __m256 keep = _mm256_cmp_ps(x, low, _CMP_NLT_UQ);  // a NaN is kept, and stays NaN
  __m256 y = _mm256_max_ps(low, x);                  // max returns its second operand for a NaN
  __m256 n = _mm256_round_ps(_mm256_mul_ps(y, _mm256_set1_ps(1.44269504f)),
                             _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), y);
  r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
  __m256 p = _mm256_set1_ps(1.9875691500e-4f);
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.3981999507e-3f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(8.3334519073e-3f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(4.1665795894e-2f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.6666665459e-1f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(5.0000001201e-1f));
  p = _mm256_fmadd_ps(p, _mm256_mul_ps(r, r), _mm256_add_ps(r, _mm256_set1_ps(1.f)));
  __m256i e = _mm256_slli_epi32(
      _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_and_ps(_mm256_mul_ps(p, _mm256_castsi256_ps(e)), keep);
}
// exp(x) for x <= 88, zero below -87.3 (no denormals).
static inline V16 exp16(V16 x) { return {exp8(x.a), exp8(x.b)}; }

static inline V16 abs16(V16 x) {
  const __m256 m = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  return {_mm256_and_ps(x.a, m), _mm256_and_ps(x.b, m)};
}
// |x| < limit ? small : big, with the sign of x given to both.
static inline V16 pick_signed(V16 x, float limit, V16 small, V16 big) {
  const __m256 l = _mm256_set1_ps(limit), sign = _mm256_set1_ps(-0.f);
  V16 m = abs16(x);
  __m256 a = _mm256_blendv_ps(big.a, small.a, _mm256_cmp_ps(m.a, l, _CMP_LT_OQ));
  __m256 b = _mm256_blendv_ps(big.b, small.b, _mm256_cmp_ps(m.b, l, _CMP_LT_OQ));
  return {_mm256_or_ps(a, _mm256_and_ps(x.a, sign)), _mm256_or_ps(b, _mm256_and_ps(x.b, sign))};
}

// ---------------------------------------------------------------- cells of the KV cache

struct F32 {
  using T = float;
  static constexpr bool kPairs = false;  // even and odd elements apart
  static inline V16 load16(const T* p) { return load(p); }
  static inline __m256 half_a(const T* p) { return _mm256_loadu_ps(p); }
  static inline __m256 half_b(const T* p) { return _mm256_loadu_ps(p + 8); }
  static inline V16 ordered(V16 x) { return x; }
  static inline void store16(T* p, V16 x) { store(p, x); }
  static inline float get(T x) { return x; }
};

struct BF16 {
  using T = uint16_t;
  static constexpr bool kPairs = true;
  static inline V16 load16(const T* p) {
    __m256i v = _mm256_loadu_si256((const __m256i*)p);
    return {_mm256_castsi256_ps(_mm256_slli_epi32(v, 16)),
            _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32(int(0xffff0000))))};
  }
  static inline __m256 half_a(const T* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256((const __m256i*)p), 16));
  }
  static inline __m256 half_b(const T* p) {
    alignas(32) static const uint32_t high[8] = {0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000,
                                                 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000};
    __m256 x = _mm256_loadu_ps((const float*)p);
    asm volatile("vandps %1, %0, %0" : "+x"(x) : "m"(high));  // the mask stays in memory
    return x;
  }
  static inline V16 ordered(V16 x) {
    __m256 lo = _mm256_unpacklo_ps(x.a, x.b), hi = _mm256_unpackhi_ps(x.a, x.b);
    return {_mm256_permute2f128_ps(lo, hi, 0x20), _mm256_permute2f128_ps(lo, hi, 0x31)};
  }
  static inline __m256i round(__m256 x) {
    __m256i u = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    __m256i r = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    r = _mm256_srli_epi32(r, 16);
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fc0), nan);
  }
  static inline void store16(T* p, V16 x) {
    __m256i v = _mm256_packus_epi32(round(x.a), round(x.b));
    _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(v, 0xd8));
  }
  static inline float get(T x) { return float_of_bf16(x); }
};

struct F16 {
  using T = uint16_t;
  static constexpr bool kPairs = false;
  static inline V16 load16(const T* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
            _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
  }
  static inline __m256 half_a(const T* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
  }
  static inline __m256 half_b(const T* p) { return half_a(p + 8); }
  static inline V16 ordered(V16 x) { return x; }
  static inline void store16(T* p, V16 x) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
  }
  static inline float get(T x) { return _cvtsh_ss(x); }
};

// a[j][r] += s[r * lds] * p[j][0 .. 16], for R rows and N vectors.
template <class C, int R, int N>
static inline void rank1(V16 (&a)[N][R], const float* s, int64_t lds,
                         const typename C::T* const (&p)[N]) {
  if constexpr (R <= 3 && !(R == 3 && C::kPairs)) {
    // Rows' scalars stay in registers, vectors come a half at a time: 5 * R + 1 registers.
    S1 b[R];
    VT_UNROLL for (int r = 0; r < R; r++) b[r] = broadcast_here(s + r * lds);
    VT_UNROLL for (int j = 0; j < N; j++) {
      __m256 x = pinned(C::half_a(p[j]));
      VT_UNROLL for (int r = 0; r < R; r++) a[j][r].a = _mm256_fmadd_ps(b[r].v, x, a[j][r].a);
      x = pinned(C::half_b(p[j]));
      VT_UNROLL for (int r = 0; r < R; r++) a[j][r].b = _mm256_fmadd_ps(b[r].v, x, a[j][r].b);
    }
  } else {
    // The vector stays, scalars come one at a time: 2 * R + 3 registers.
    VT_UNROLL for (int j = 0; j < N; j++) {
      V16 x = C::load16(p[j]);
      x = {pinned(x.a), pinned(x.b)};
      VT_UNROLL for (int r = 0; r < R; r++) a[j][r] = fma(broadcast_here(s + r * lds), x, a[j][r]);
    }
  }
}

// Groups of 16 tokens (QK) and vectors of 16 dims (PV) worked on at once with R query rows: enough
// independent sums to hide the latency of fma (4 cycles, 2 a cycle), few enough for 16 registers.
constexpr int groups_for(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }

}  // namespace vt
