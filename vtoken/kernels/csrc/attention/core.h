// What both kinds of work item are made of: logits, exponentials and weighted values of some live
// tokens, for rows of queries that share a KV head.
#pragma once
#include <type_traits>

#include "attention.h"

namespace vt {

// A thread's own part of the workspace.
struct Scratch {
  int64_t* rows;  // offsets of V rows of a tile, then lists of what to prefetch
  float *q, *o, *stat, *p;
  int64_t packed = -1;  // which decode query `q` holds: request * HK + first head
};

// Rows are worked on in runs of at most kMaxRows, as equal as possible.
static inline int first_run(int rows) {
  const int runs = (rows + kMaxRows - 1) / kMaxRows;
  return (rows + runs - 1) / runs;
}

// f(integral_constant<rows of the run>, first row of the run) for each run of `rows`.
template <class F>
static inline void for_runs(int rows, F f) {
  for (int i = 0; i < rows;) {
    const int run = first_run(rows - i);
    switch (run) {
      case 1: f(std::integral_constant<int, 1>(), i); break;
      case 2: f(std::integral_constant<int, 2>(), i); break;
      case 3: f(std::integral_constant<int, 3>(), i); break;
      case 4: f(std::integral_constant<int, 4>(), i); break;
      case 5: f(std::integral_constant<int, 5>(), i); break;
      default: f(std::integral_constant<int, 6>(), i); break;
    }
    i += run;
  }
}

template <class C>
struct Core {
  using T = typename C::T;
  const Args& a;
  const Plan& plan;
  const Shape& s;
  const Space& space;

  // ------------------------------------------------------------ where things lie

  const T* head(int h) const { return (const T*)a.kv + h * a.head_stride; }
  // A group's keys and values, relative to a head's base.
  int64_t k_at(const Group& g) const {
    return g.block * a.block_stride + int64_t(g.offset / a.k_group) * a.k_group * s.D +
           g.offset % a.k_group;
  }
  int64_t v_at(const Group& g) const {
    return g.block * a.block_stride + int64_t(plan.block_size + g.offset) * s.D;
  }
  // Live tokens of the request before group g of a tile.
  int live_before(const Tile& t, int g) const {
    return g < t.g1 ? plan.groups[g].live0 : t.live1;
  }

  // Query rows [row0, row0 + rows) of (request, head), scaled, in runs of [D][run].
  void pack_query(const Request& r, int h, int row0, int rows, float* q) const {
    for_runs(rows, [&](auto R, int i) {
      constexpr int run = decltype(R)::value;
      for (int k = 0; k < run; k++) {
        const int row = row0 + i + k;
        const T* src = (const T*)a.query + (r.q0 + row / s.G) * a.query_stride +
                       int64_t(h * s.G + row % s.G) * s.D;
        for (int d = 0; d < s.D; d++) q[int64_t(i) * s.D + d * run + k] = C::get(src[d]) * a.scale;
      }
    });
  }

  // Offsets of a tile's live V rows, then copies of the last one, which are only prefetched.
  void list_rows(const Tile& t, int64_t* rows) const {
    int n = 0;
    for (int g = t.g0; g < t.g1; g++) {
      const int64_t v = v_at(plan.groups[g]);
      for (unsigned m = plan.groups[g].mask; m; m &= m - 1)
        rows[n++] = v + __builtin_ctz(m) * s.D;
    }
    for (int i = n; i < 2 * kTileLive; i++) rows[i] = rows[n - 1];
  }

  // ------------------------------------------------------------ logits

  template <int R, int NG>
  void logits_batch(const float* q, const Group* g, int h, int live0, int64_t ld,
                    const Ahead<T>& ahead, float* p) const {
    const T* k[NG];
    for (int i = 0; i < NG; i++) k[i] = head(h) + k_at(g[i]);
    V16 x[R][NG];
    qk<C, R, NG>(q, k, a.k_group, s.D, ahead, x);
    for (int i = 0; i < NG; i++)
      for (int r = 0; r < R; r++) {
        V16 y = C::ordered(x[r][i]);
        if (a.softcap != 0.f)
          y = mul(tanh16(mul(y, splat(1.f / a.softcap))), splat(a.softcap));
        float* dst = p + r * ld + g[i].live0 - live0;
        g[i].mask == 0xffff ? store(dst, y) : compress_store(dst, y, g[i].mask);
      }
  }

  // p[row][live - live0] = logits of groups [g0, g1); 16 floats after the last one are written too.
  void logits(const float* q, int rows, int g0, int g1, int h, int live0, int64_t ld,
              Ahead<T> ahead, float* p) const {
    for_runs(rows, [&](auto R, int i) {
      constexpr int run = decltype(R)::value, NG = groups_for(run);
      const float* qr = q + int64_t(i) * s.D;
      Ahead<T> next = ahead;
      int g = g0;
      for (; g + NG <= g1; g += NG) {
        logits_batch<run, NG>(qr, &plan.groups[g], h, live0, ld, next, p + i * ld);
        if (next.at) next.at += 16 * NG;
      }
      for (; g < g1; g++) {
        logits_batch<run, 1>(qr, &plan.groups[g], h, live0, ld, next, p + i * ld);
        if (next.at) next.at += 16;
      }
      ahead.at = nullptr;  // the first run of rows has brought it
    });
  }

  // Lists for `tile_logits`: with group g comes the group kBehind after it.
  static constexpr int kBehind = 2;
  void list_keys(const Tile& t, int64_t* at) const {
    for (int g = t.g0; g < t.g1; g++) {
      const int64_t k = k_at(plan.groups[g + kBehind < t.g1 ? g + kBehind : t.g1 - 1]);
      for (int l = 0; l < 16; l++) *at++ = k + int64_t(l) * (s.D / 16) * a.k_group;
    }
  }

  // The logits of a whole tile; where rows take several runs, two groups at a time, so that they
  // stay in the L1 cache.
  void tile_logits(const float* q, int rows, const Tile& t, int h, const int64_t* at,
                   float* p) const {
    const int part = rows <= kMaxRows ? t.g1 - t.g0 : 2;
    for (int g = t.g0; g < t.g1; g += part, at += 16 * part)
      logits(q, rows, g, g + part < t.g1 ? g + part : t.g1, h, t.live0, t.ld,
             {head(h), at, a.k_group, 0}, p);
  }

  // ------------------------------------------------------------ exponentials

  // Turn n logits into exp(x - m), m the larger of their maximum and the `m` so far; what was
  // summed up with the old m, z and o, is brought to the new one.
  void absorb(float* p, int n, float& m, float& z, float* o) const {
    store(p + n, splat(-INFINITY));
    V16 top = splat(m);
    for (int t = 0; t < n; t += 16) top = max(load(p + t), top);
    const float before = m;
    m = hmax(top);
    if (m == -INFINITY) {
      for (int t = 0; t < n; t += 16) store(p + t, zero());
      return;
    }
    V16 total = zero();
    for (int t = 0; t < n; t += 16) {
      V16 e = exp16(sub(load(p + t), splat(m)));
      total = add(total, e);
      store(p + t, e);
    }
    if (m != before && before != -INFINITY) {
      const float shrink = std::exp(before - m);
      z *= shrink;
      for (int d = 0; d < s.D; d += 16) store(o + d, mul(load(o + d), splat(shrink)));
    }
    z += hsum(total);
  }

  // ------------------------------------------------------------ values

  // o[row][D] += p[row][t] * v[t] over n tokens.
  void values(const float* p, int rows, int64_t ld, int h, const int64_t* row, int n, float* o,
              Ahead<T> ahead) const {
    for_runs(rows, [&](auto R, int i) {
      constexpr int run = decltype(R)::value, NV = groups_for(run);
      const float* pr = p + i * ld;
      float* orow = o + int64_t(i) * s.D;
      int d = 0;
      for (; d + 16 * NV <= s.D; d += 16 * NV)
        pv<C, run, NV>(pr, ld, head(h), row, n, d, orow, s.D, ahead);
      for (; d < s.D; d += 16) pv<C, run, 1>(pr, ld, head(h), row, n, d, orow, s.D, ahead);
      ahead.at = nullptr;
    });
  }

  // The same over a tile, a few tokens at a time so that they stay in the L1 cache.
  void tile_values(const float* p, int rows, const Tile& t, int h, const int64_t* row,
                   float* o) const {
    const int n = t.live1 - t.live0;
    int part = 8192 / int(s.D * sizeof(T));
    part = part < 8 ? 8 : part > 64 ? 64 : part;
    for (int t0 = 0; t0 < n; t0 += part) {
      const int c = t0 + part < n ? part : n - t0;
      values(p + t0, rows, t.ld, h, row + t0, c, o, {head(h), row + t0 + c, 16, 1});
    }
  }

  void write_out(int64_t token, int hq, const float* o, float factor) const {
    T* dst = (T*)a.out + token * a.out_stride + int64_t(hq) * s.D;
    for (int d = 0; d < s.D; d += 16)
      C::store16(dst + d, C::ordered(mul(load(o + d), splat(factor))));
  }
};

}  // namespace vt
