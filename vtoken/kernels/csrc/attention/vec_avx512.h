// Sixteen floats as one AVX-512 register (F, BW, DQ, VL); included by vec.h.
#pragma once
#define VT_VARIANT "avx512"

namespace vt {

struct V16 {
  __m512 v;
};

static inline V16 splat(float x) { return {_mm512_set1_ps(x)}; }
static inline V16 zero() { return {_mm512_setzero_ps()}; }
static inline V16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline void store(float* p, V16 x) { _mm512_storeu_ps(p, x.v); }
static inline V16 add(V16 x, V16 y) { return {_mm512_add_ps(x.v, y.v)}; }
static inline V16 sub(V16 x, V16 y) { return {_mm512_sub_ps(x.v, y.v)}; }
static inline V16 mul(V16 x, V16 y) { return {_mm512_mul_ps(x.v, y.v)}; }
static inline V16 div(V16 x, V16 y) { return {_mm512_div_ps(x.v, y.v)}; }
static inline V16 max(V16 x, V16 y) { return {_mm512_max_ps(x.v, y.v)}; }
static inline V16 min(V16 x, V16 y) { return {_mm512_min_ps(x.v, y.v)}; }
static inline V16 fma(V16 x, V16 y, V16 z) { return {_mm512_fmadd_ps(x.v, y.v, z.v)}; }

struct S1 {
  __m512 v;
};
static inline S1 broadcast(const float* p) { return {_mm512_set1_ps(*p)}; }
static inline V16 fma(S1 s, V16 y, V16 z) { return {_mm512_fmadd_ps(s.v, y.v, z.v)}; }

static inline float hsum(V16 x) {
  alignas(64) float f[16];
  _mm512_store_ps(f, x.v);
  for (int w = 8; w; w /= 2)
    for (int i = 0; i < w; i++) f[i] += f[i + w];
  return f[0];
}
static inline float hmax(V16 x) {
  alignas(64) float f[16];
  _mm512_store_ps(f, x.v);
  for (int w = 8; w; w /= 2)
    for (int i = 0; i < w; i++) f[i] = f[i + w] > f[i] ? f[i + w] : f[i];
  return f[0];
}

// Compress in a register, then store: the form with a memory operand is microcoded on Zen 4.
static inline void compress_store(float* p, V16 x, unsigned mask) {
  _mm512_storeu_ps(p, _mm512_maskz_compress_ps((__mmask16)mask, x.v));
}

static inline V16 exp16(V16 x) {
  const __m512 low = _mm512_set1_ps(-87.3f);
  __mmask16 keep = _mm512_cmp_ps_mask(x.v, low, _CMP_NLT_UQ);
  __m512 y = _mm512_max_ps(low, x.v);
  __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(y, _mm512_set1_ps(1.44269504f)),
                                  _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), y);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.f)));
  __m512i e = _mm512_slli_epi32(
      _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23);
  return {_mm512_maskz_mul_ps(keep, p, _mm512_castsi512_ps(e))};
}

static inline V16 abs16(V16 x) {
  return {_mm512_castsi512_ps(
      _mm512_and_epi32(_mm512_castps_si512(x.v), _mm512_set1_epi32(0x7fffffff)))};
}
static inline V16 pick_signed(V16 x, float limit, V16 small, V16 big) {
  __mmask16 m = _mm512_cmp_ps_mask(abs16(x).v, _mm512_set1_ps(limit), _CMP_LT_OQ);
  __m512 y = _mm512_mask_blend_ps(m, big.v, small.v);
  __m512i sign = _mm512_and_epi32(_mm512_castps_si512(x.v), _mm512_set1_epi32(int(0x80000000)));
  return {_mm512_castsi512_ps(_mm512_or_epi32(_mm512_castps_si512(y), sign))};
}

// ---------------------------------------------------------------- cells of the KV cache

struct F32 {
  using T = float;
  static inline V16 load16(const T* p) { return load(p); }
  static inline V16 ordered(V16 x) { return x; }
  static inline void store16(T* p, V16 x) { store(p, x); }
  static inline float get(T x) { return x; }
};

struct BF16 {
  using T = uint16_t;
  static inline V16 load16(const T* p) {
    __m512i v = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(v, 16))};
  }
  static inline V16 ordered(V16 x) { return x; }
  static inline void store16(T* p, V16 x) {
    __m512i u = _mm512_castps_si512(x.v);
    __m512i odd = _mm512_and_epi32(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    __m512i r = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    r = _mm512_srli_epi32(r, 16);
    __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
    r = _mm512_mask_mov_epi32(r, nan, _mm512_set1_epi32(0x7fc0));
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(r));
  }
  static inline float get(T x) { return float_of_bf16(x); }
};

struct F16 {
  using T = uint16_t;
  static inline V16 load16(const T* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))};
  }
  static inline V16 ordered(V16 x) { return x; }
  static inline void store16(T* p, V16 x) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT));
  }
  static inline float get(T x) { return _cvtsh_ss(x); }
};

// a[j][r] += s[r * lds] * p[j][0 .. 16], for R rows and N vectors. The scalar is a broadcast memory
// operand of the fma; 32 registers leave the compiler no reason to spill.
template <class C, int R, int N>
static inline void rank1(V16 (&a)[N][R], const float* s, int64_t lds,
                         const typename C::T* const (&p)[N]) {
  VT_UNROLL for (int j = 0; j < N; j++) {
    V16 x = C::load16(p[j]);
    VT_UNROLL for (int r = 0; r < R; r++) a[j][r] = fma(broadcast(s + r * lds), x, a[j][r]);
  }
}

// 32 registers: twice the independent sums of the AVX2 form, each of them one register.
constexpr int groups_for(int rows) { return rows == 1 ? 8 : rows <= 3 ? 4 : rows == 4 ? 3 : 2; }

}  // namespace vt
