// The work items of attention.h for one cell type.
#pragma once
#include "attention.h"

namespace vt {

// A thread's own part of the workspace.
template <class C>
struct Scratch {
  const typename C::T** rows;  // pointers to V rows of a tile, twice a tile long
  float *q, *o, *stat, *p;
};

template <class C>
struct Job {
  using T = typename C::T;
  const Args& a;
  const Plan& plan;
  Shape s;
  Space& space;
  std::atomic<int64_t> next_item{0};
  std::atomic<int32_t> next_thread{0};

  Job(const Args& args, const Shape& shape, Space& sp)
      : a(args), plan(*args.plan), s(shape), space(sp) {}

  // ------------------------------------------------------------ shared by both kinds of item

  const T* k_group(const Group& g, int h) const {
    return (const T*)a.kv + g.block * a.block_stride + h * a.head_stride +
           int64_t(g.offset / a.k_group) * a.k_group * s.D + g.offset % a.k_group;
  }
  const T* v_row(const Group& g, int h) const {
    return (const T*)a.kv + g.block * a.block_stride + h * a.head_stride +
           int64_t(plan.block_size + g.offset) * s.D;
  }

  // Query rows [row0, row0 + rows) of (request, head), scaled, in runs of [D][run].
  void pack_query(const Request& r, int h, int row0, int rows, float* q) const {
    for (int i = 0; i < rows;) {
      const int run = first_run(rows - i);
      for (int k = 0; k < run; k++) {
        const int row = row0 + i + k;
        const T* src = (const T*)a.query + (r.q0 + row / s.G) * a.query_stride +
                       int64_t(h * s.G + row % s.G) * s.D;
        for (int d = 0; d < s.D; d++) q[d * run + k] = C::get(src[d]) * a.scale;
      }
      q += int64_t(run) * s.D;
      i += run;
    }
  }

  // Live V rows of a tile, then `kTileLive` copies of the last one (they are only prefetched).
  void list_rows(const Tile& t, int h, const T** rows) const {
    int n = 0;
    for (int g = t.g0; g < t.g1; g++) {
      const T* v = v_row(plan.groups[g], h);
      for (unsigned m = plan.groups[g].mask; m; m &= m - 1) rows[n++] = v + __builtin_ctz(m) * s.D;
    }
    const T* last = rows[n - 1];
    for (int i = 0; i < n; i++) rows[n + i] = last;
  }

  template <int R, int NG>
  void logits_run(const float* q, const Group* g, int h, const Tile& t, const T* const* next,
                  float* p) const {
    const T* k[NG];
    for (int i = 0; i < NG; i++) k[i] = k_group(g[i], h);
    V16 x[R][NG];
    qk<C, R, NG>(q, k, next, a.k_group, s.D, x);
    for (int i = 0; i < NG; i++)
      for (int r = 0; r < R; r++) {
        V16 y = C::ordered(x[r][i]);
        if (a.softcap != 0.f)
          y = mul(tanh16(mul(y, splat(1.f / a.softcap))), splat(a.softcap));
        float* dst = p + int64_t(r) * t.ld + g[i].live0 - t.live0;
        if (g[i].mask == 0xffff)
          store(dst, y);
        else
          compress_store(dst, y, g[i].mask);
      }
  }

  template <int R>
  void logits_rows(const float* q, int g0, int g1, int h, const Tile& t, const T* after,
                   float* p) const {
    constexpr int NG = groups_for(R);
    int g = g0;
    for (; g + NG <= g1; g += NG) {
      const T* next[NG];
      for (int i = 0; i < NG; i++)
        next[i] = g + NG + i < t.g1 ? k_group(plan.groups[g + NG + i], h) : after;
      logits_run<R, NG>(q, &plan.groups[g], h, t, next, p);
    }
    for (; g < g1; g++) {
      const T* next = g + 1 < t.g1 ? k_group(plan.groups[g + 1], h) : after;
      logits_run<R, 1>(q, &plan.groups[g], h, t, &next, p);
    }
  }

  // p[row][live] = logits of one tile; entries beyond the last live token are -inf.
  void tile_logits(const float* q, int rows, const Tile& t, int h, const T* after,
                   float* p) const {
    const int step = rows <= kMaxRows ? t.g1 - t.g0 : 2;  // groups that stay in the L1 cache
    for (int g = t.g0; g < t.g1; g += step) {
      const int g1 = g + step < t.g1 ? g + step : t.g1;
      const float* qr = q;
      for (int i = 0; i < rows;) {
        const int run = first_run(rows - i);
        float* pr = p + int64_t(i) * t.ld;
        switch (run) {
          case 1: logits_rows<1>(qr, g, g1, h, t, after, pr); break;
          case 2: logits_rows<2>(qr, g, g1, h, t, after, pr); break;
          case 3: logits_rows<3>(qr, g, g1, h, t, after, pr); break;
          case 4: logits_rows<4>(qr, g, g1, h, t, after, pr); break;
          case 5: logits_rows<5>(qr, g, g1, h, t, after, pr); break;
          default: logits_rows<6>(qr, g, g1, h, t, after, pr); break;
        }
        qr += int64_t(run) * s.D;
        i += run;
      }
    }
    const int n = t.live1 - t.live0;
    for (int i = 0; i < rows; i++) store(p + int64_t(i) * t.ld + n, splat(-INFINITY));
  }

  // Turn one row of logits into exp(x - m), m the larger of its maximum and `floor`.
  static float row_exp(float* p, int n, float floor, float& sum) {
    V16 mx = splat(floor);
    for (int t = 0; t < n; t += 16) mx = max(load(p + t), mx);
    const float m = hmax(mx);
    V16 total = zero();
    if (m == -INFINITY) {
      for (int t = 0; t < n; t += 16) store(p + t, total);
    } else {
      const V16 shift = splat(m);
      for (int t = 0; t < n; t += 16) {
        V16 e = exp16(sub(load(p + t), shift));
        total = add(total, e);
        store(p + t, e);
      }
    }
    sum = hsum(total);
    return m;
  }

  template <int R>
  void values_rows(const float* p, int64_t ld, const T* const* v, int n, float* o) const {
    constexpr int NV = groups_for(R);
    int d = 0;
    for (; d + 16 * NV <= s.D; d += 16 * NV) pv<C, R, NV>(p, ld, v, n, d, o, s.D, true);
    for (; d < s.D; d += 16) pv<C, R, 1>(p, ld, v, n, d, o, s.D, true);
  }

  // o[row][D] += p[row][live] * V of one tile, a few tokens at a time so that they stay in L1.
  void tile_values(const float* p, int rows, const Tile& t, const T* const* v, float* o) const {
    const int n = t.live1 - t.live0;
    int sub = 8192 / int(s.D * sizeof(T));
    sub = sub < 8 ? 8 : sub > 64 ? 64 : sub;
    for (int t0 = 0; t0 < n; t0 += sub) {
      const int c = t0 + sub < n ? sub : n - t0;
      for (int i = 0; i < rows;) {
        const int run = first_run(rows - i);
        const float* pr = p + int64_t(i) * t.ld + t0;
        float* orow = o + int64_t(i) * s.D;
        switch (run) {
          case 1: values_rows<1>(pr, t.ld, v + t0, c, orow); break;
          case 2: values_rows<2>(pr, t.ld, v + t0, c, orow); break;
          case 3: values_rows<3>(pr, t.ld, v + t0, c, orow); break;
          case 4: values_rows<4>(pr, t.ld, v + t0, c, orow); break;
          case 5: values_rows<5>(pr, t.ld, v + t0, c, orow); break;
          default: values_rows<6>(pr, t.ld, v + t0, c, orow); break;
        }
        i += run;
      }
    }
  }

  void write_out(int64_t token, int hq, const float* o, float factor) const {
    T* dst = (T*)a.out + token * a.out_stride + int64_t(hq) * s.D;
    for (int d = 0; d < s.D; d += 16)
      C::store16(dst + d, C::ordered(mul(load(o + d), splat(factor))));
  }

  // ------------------------------------------------------------ decode

  void decode_item(const Item& it, Scratch<C>& w) const {
    const Request& r = plan.requests[it.request];
    const Tile& t = plan.tiles[r.t0 + it.part];
    const Share& sh = space.shares[it.request];
    const int hq = it.head * s.G;
    float* p = space.floats + sh.p + int64_t(s.HQ) * t.s0 + int64_t(hq) * t.ld;
    float* o = space.floats + sh.o + (int64_t(it.part) * s.HQ + hq) * s.D;
    float* ml = space.floats + sh.ml + (int64_t(it.part) * s.HQ + hq) * 2;
    pack_query(r, it.head, 0, s.G, w.q);
    if (a.out) list_rows(t, it.head, w.rows);
    const T* after = a.out ? w.rows[0] : k_group(plan.groups[t.g1 - 1], it.head);
    tile_logits(w.q, s.G, t, it.head, after, p);
    const int n = t.live1 - t.live0;
    for (int g = 0; g < s.G; g++)
      ml[2 * g] = row_exp(p + int64_t(g) * t.ld, n, -INFINITY, ml[2 * g + 1]);
    if (!a.out) return;
    memset(o, 0, sizeof(float) * s.G * s.D);
    tile_values(p, s.G, t, w.rows, o);
  }

  // Combine the tiles of a one-query request: outputs, then score sums.
  void decode_finish(int index, Scratch<C>& w) const {
    const Request& r = plan.requests[index];
    const Share& sh = space.shares[index];
    const int tiles = r.t1 - r.t0;
    float* ml = space.floats + sh.ml;
    const float* o = space.floats + sh.o;
    for (int hq = 0; hq < s.HQ; hq++) {
      float m = -INFINITY, z = 0;
      for (int t = 0; t < tiles; t++) m = std::fmax(m, ml[(t * s.HQ + hq) * 2]);
      // The factor of a tile replaces its maximum; its sum is no longer needed after this loop.
      for (int t = 0; t < tiles; t++) {
        float* x = ml + (t * s.HQ + hq) * 2;
        x[0] = x[0] == -INFINITY ? 0.f : std::exp(x[0] - m);
        z += x[0] * x[1];
      }
      const float inv = z == 0.f ? 0.f : 1.f / z;
      for (int t = 0; t < tiles; t++) ml[(t * s.HQ + hq) * 2] *= inv;
      if (!a.out) continue;
      memset(w.o, 0, sizeof(float) * s.D);
      for (int t = 0; t < tiles; t++) {
        const V16 f = splat(ml[(t * s.HQ + hq) * 2]);
        const float* x = o + (int64_t(t) * s.HQ + hq) * s.D;
        for (int d = 0; d < s.D; d += 16) store(w.o + d, fma(f, load(x + d), load(w.o + d)));
      }
      write_out(r.q0, hq, w.o, 1.f);
    }
    if (!s.scores || !r.counted) return;
    for (int t = 0; t < tiles; t++) {
      const Tile& tile = plan.tiles[r.t0 + t];
      const float* p = space.floats + sh.p + int64_t(s.HQ) * tile.s0;
      float* sum = space.floats + sh.sum + tile.s0;
      for (int i = 0; i < tile.ld - 16; i += 16) {
        V16 x = zero();
        for (int hq = 0; hq < s.HQ; hq++)
          x = fma(broadcast(ml + (t * s.HQ + hq) * 2), load(p + int64_t(hq) * tile.ld + i), x);
        store(sum + i, x);
      }
    }
  }

  // ------------------------------------------------------------ several queries

  int passes(const Request& r) const { return (r.n * s.G + kPassRows - 1) / kPassRows; }

  void chunk_item(const Item& it, Scratch<C>& w) const {
    const Request& r = plan.requests[it.request];
    const int units = units_of(r, s.G), total = passes(r);
    const int first = int(int64_t(it.part) * total / units);
    const int last = int(int64_t(it.part + 1) * total / units);
    float* sums = nullptr;
    if (s.scores && r.counted) {
      sums = space.floats + space.shares[it.request].units +
             (int64_t(it.head) * units + it.part) * r.s_len;
      memset(sums, 0, sizeof(float) * r.s_len);
    }
    for (int pass = first; pass < last; pass++) {
      const int row0 = pass * kPassRows;
      const int rows = r.n * s.G - row0 < kPassRows ? r.n * s.G - row0 : kPassRows;
      const bool counted = sums && (row0 + rows - 1) / s.G >= r.n - r.counted;
      if (counted || a.out) chunk_pass(r, it.head, row0, rows, counted ? sums : nullptr, w);
    }
  }

  // Live tokens that query row `row` of a chunk attends.
  int limit(const Request& r, int row) const { return r.nlive - r.n + row / s.G + 1; }

  void chunk_pass(const Request& r, int h, int row0, int rows, float* sums,
                  Scratch<C>& w) const {
    float *m = w.stat, *z = m + rows, *hist = z + rows;  // hist[tile][row]: maximum p refers to
    for (int i = 0; i < rows; i++) m[i] = -INFINITY, z[i] = 0.f;
    pack_query(r, h, row0, rows, w.q);
    memset(w.o, 0, sizeof(float) * rows * s.D);
    const int end = limit(r, row0 + rows - 1);
    int t = r.t0;
    for (; t < r.t1 && plan.tiles[t].live0 < end; t++) {
      const Tile& tile = plan.tiles[t];
      float* p = w.p + (sums ? int64_t(rows) * tile.s0 : 0);
      if (a.out) list_rows(tile, h, w.rows);
      const T* after = a.out ? w.rows[0] : k_group(plan.groups[tile.g1 - 1], h);
      tile_logits(w.q, rows, tile, h, after, p);
      const int n = tile.live1 - tile.live0;
      for (int i = 0; i < rows; i++) {
        float* x = p + int64_t(i) * tile.ld;
        int from = limit(r, row0 + i) - tile.live0;
        for (from = from < 0 ? 0 : from; from < n; from++) x[from] = -INFINITY;
        float sum;
        const float before = m[i];
        m[i] = row_exp(x, n, before, sum);
        hist[int64_t(t - r.t0) * rows + i] = m[i];
        if (m[i] != before && before != -INFINITY) {
          const float shrink = std::exp(before - m[i]);
          z[i] *= shrink;
          for (int d = 0; d < s.D; d += 16) {
            float* o = w.o + int64_t(i) * s.D + d;
            store(o, mul(load(o), splat(shrink)));
          }
        }
        z[i] += sum;
      }
      if (a.out) tile_values(p, rows, tile, w.rows, w.o);
    }
    for (int i = 0; a.out && i < rows; i++)
      write_out(r.q0 + (row0 + i) / s.G, h * s.G + (row0 + i) % s.G, w.o + int64_t(i) * s.D,
                1.f / z[i]);
    if (sums) add_scores(r, row0, rows, t, m, z, hist, sums, w);
  }

  // sums[live] += p / z over the counted rows of a pass.
  void add_scores(const Request& r, int row0, int rows, int t1, const float* m, const float* z,
                  float* hist, float* sums, Scratch<C>& w) const {
    int first = (r.n - r.counted) * s.G - row0;
    if (first < 0) first = 0;
    for (int t = r.t0; t < t1; t++) {
      const Tile& tile = plan.tiles[t];
      float* f = hist + int64_t(t - r.t0) * rows;
      for (int i = first; i < rows; i++)
        f[i] = f[i] == -INFINITY ? 0.f : std::exp(f[i] - m[i]) / z[i];
      const float* p = w.p + int64_t(rows) * tile.s0;
      for (int k = 0; k < tile.ld - 16; k += 16) {
        V16 x = load(sums + tile.s0 + k);
        for (int i = first; i < rows; i++)
          x = fma(broadcast(f + i), load(p + int64_t(i) * tile.ld + k), x);
        store(sums + tile.s0 + k, x);
      }
    }
  }

  void chunk_finish(int index) const {
    const Request& r = plan.requests[index];
    if (!s.scores || !r.counted) return;
    const Share& sh = space.shares[index];
    const int parts = s.HK * units_of(r, s.G);
    float* sum = space.floats + sh.sum;
    for (int k = 0; k < r.s_len; k += 16) {
      V16 x = zero();
      const float* u = space.floats + sh.units + k;
      for (int i = 0; i < parts; i++) x = add(x, load(u + int64_t(i) * r.s_len));
      store(sum + k, x);
    }
  }

  // ------------------------------------------------------------ the whole batch

  // step_scores[slot] += the request's sums.
  void scatter(int index) const {
    const Request& r = plan.requests[index];
    if (!s.scores || !r.counted) return;
    const float* sum = space.floats + space.shares[index].sum;
    for (int t = r.t0; t < r.t1; t++) {
      const Tile& tile = plan.tiles[t];
      const float* x = sum + tile.s0 - tile.live0;
      for (int g = tile.g0; g < tile.g1; g++) {
        const Group& gr = plan.groups[g];
        float* dst = a.step_scores + int64_t(gr.block) * plan.block_size + gr.offset;
        const float* src = x + gr.live0;
        if (gr.mask == 0xffff)
          store(dst, add(load(dst), load(src)));
        else
          for (unsigned m = gr.mask; m; m &= m - 1) dst[__builtin_ctz(m)] += *src++;
      }
    }
  }

  void list_items() {
    size_t n = 0;
    // Chunks first, their last (longest) runs foremost: a short item at the end keeps threads even.
    for (int decode = 0; decode < 2; decode++)
      for (size_t i = 0; i < plan.requests.size(); i++) {
        const Request& r = plan.requests[i];
        if (r.n == 0 || (r.n == 1) != (decode == 1)) continue;
        const int parts = r.n == 1 ? r.t1 - r.t0 : units_of(r, s.G);
        new (&space.remaining[i]) std::atomic<int32_t>(parts * s.HK);
        for (int part = parts - 1; part >= 0; part--)
          for (int h = 0; h < s.HK; h++) space.items[n++] = {int32_t(i), h, decode ? parts - 1 - part : part};
        if (r.n == 1 && parts == 0 && a.out) {
          // Nothing to attend: zero, as a sum over no token.
          T* dst = (T*)a.out + r.q0 * a.out_stride;
          memset((void*)dst, 0, sizeof(T) * s.HQ * s.D);
        }
      }
  }

  void work() {
    const int me = next_thread.fetch_add(1);
    float* f = (float*)(space.scratch + space.scratch_each * me);
    Scratch<C> w{(const T**)f, f + space.sq, f + space.so, f + space.sstat, f + space.sp};
    for (;;) {
      const int64_t i = next_item.fetch_add(1, std::memory_order_relaxed);
      if (i >= int64_t(space.num_items)) return;
      const Item& it = space.items[i];
      const bool decode = plan.requests[it.request].n == 1;
      if (decode)
        decode_item(it, w);
      else
        chunk_item(it, w);
      if (space.remaining[it.request].fetch_sub(1, std::memory_order_acq_rel) != 1) continue;
      if (decode)
        decode_finish(it.request, w);
      else
        chunk_finish(it.request);
      if (!plan.shared_slots) scatter(it.request);
    }
  }

  void run(int threads) {
    list_items();
    if (threads > 1)
      a.parallel([](void* self) { ((Job*)self)->work(); }, this, unsigned(threads), 0);
    else
      work();
    if (plan.shared_slots)
      for (size_t i = 0; i < plan.requests.size(); i++) scatter(int(i));
  }
};

}  // namespace vt
