// The two inner loops: R query rows against 16-token groups of K, R rows of P against rows of V.
//
// K of a (block, head) is [D, k_group]: 16 tokens of one dim are adjacent, so a group is read as D
// vectors `step` cells apart and no horizontal sum is needed. V is [N, D]: one row a token.
// Both prefetch what comes next: the hardware does not follow a block table.
#pragma once
#include "plan.h"
#include "vec.h"

namespace vt {

constexpr int kMaxRows = 6;  // query rows of one inner loop

// What to bring into the cache meanwhile, spread evenly over the arithmetic and in the order of its
// addresses (memory likes that better than the order of use), as vectors of 16 cells:
//   QK reads groups; group g brings 16 lists of D / 16 vectors, list l from base + at[16 * g + l]
//     on, `step` cells apart.
//   PV reads 16 * NV dims in a pass; the pass of dims d0.. brings, with token t, NV vectors from
//     base + at[t] + d0 * pass_step on, `step` cells apart.
template <class T>
struct Ahead {
  const T* base;
  const int64_t* at;  // null: nothing
  int64_t step, pass_step;
};

// s[r][g] = sum over d of q[d][r] * k[g][d * step .. + 16]
template <class C, int R, int NG>
static inline void qk(const float* q, const typename C::T* const* k, int64_t step, int D,
                      const Ahead<typename C::T>& ahead, V16 (&s)[R][NG]) {
  V16 a[NG][R];
  VT_UNROLL for (int r = 0; r < R; r++)
    VT_UNROLL for (int g = 0; g < NG; g++) a[g][r] = zero();
  const typename C::T* kp[NG];
  VT_UNROLL for (int g = 0; g < NG; g++) kp[g] = k[g];
  const int width = D / 16;
  if (ahead.at) {
    for (int l = 0; l < 16; l++) {
      const typename C::T* np[NG];
      VT_UNROLL for (int g = 0; g < NG; g++) np[g] = ahead.base + ahead.at[16 * g + l];
      for (int d = 0; d < width; d++, q += R) {
        rank1<C, R, NG>(a, q, 1, kp);
        VT_UNROLL for (int g = 0; g < NG; g++) {
          __builtin_prefetch(np[g]);
          np[g] += ahead.step;
          kp[g] += step;
        }
      }
    }
  } else {
    for (int d = 0; d < D; d++, q += R) {
      rank1<C, R, NG>(a, q, 1, kp);
      VT_UNROLL for (int g = 0; g < NG; g++) kp[g] += step;
    }
  }
  VT_UNROLL for (int r = 0; r < R; r++)
    VT_UNROLL for (int g = 0; g < NG; g++) s[r][g] = a[g][r];
}

// o[r][16 * NV] += sum over t of p[r][t] * v[t]; `o` keeps the cell's register order.
template <class C, int R, int NV>
static inline void pv(const float* p, int64_t ld, const typename C::T* v, const int64_t* row,
                      int n, int d0, float* o, int64_t ldo, const Ahead<typename C::T>& ahead) {
  V16 a[NV][R];
  VT_UNROLL for (int r = 0; r < R; r++)
    VT_UNROLL for (int j = 0; j < NV; j++) a[j][r] = load(o + r * ldo + d0 + 16 * j);
  v += d0;
  auto token = [&](int t) __attribute__((always_inline)) {
    const typename C::T* xs[NV];
    VT_UNROLL for (int j = 0; j < NV; j++) xs[j] = v + row[t] + 16 * j;
    rank1<C, R, NV>(a, p + t, ld, xs);
  };
  if (ahead.at) {
    const typename C::T* next = ahead.base + d0 * ahead.pass_step;
    for (int t = 0; t < n; t++) {
      const typename C::T* np = next + ahead.at[t];
      VT_UNROLL for (int j = 0; j < NV; j++) __builtin_prefetch(np + j * ahead.step);
      token(t);
    }
  } else {
    for (int t = 0; t < n; t++) token(t);
  }
  VT_UNROLL for (int r = 0; r < R; r++)
    VT_UNROLL for (int j = 0; j < NV; j++) store(o + r * ldo + d0 + 16 * j, a[j][r]);
}

// tanh with a relative error near float32's: a polynomial near zero, 1 - 2 / (e^2x + 1) elsewhere.
static inline V16 tanh16(V16 x) {
  V16 z = mul(x, x);
  V16 p = splat(-5.70498872745e-3f);
  p = fma(p, z, splat(2.06390887954e-2f));
  p = fma(p, z, splat(-5.37397155531e-2f));
  p = fma(p, z, splat(1.33314422036e-1f));
  p = fma(p, z, splat(-3.33332819422e-1f));
  V16 small = fma(mul(p, z), x, x);
  V16 m = abs16(x);
  V16 e = exp16(min(add(m, m), splat(80.f)));
  V16 big = sub(splat(1.f), div(splat(2.f), add(e, splat(1.f))));
  return pick_signed(x, 0.625f, small, big);
}

}  // namespace vt
