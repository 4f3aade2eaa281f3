// Requests with several queries: items are runs of query rows, which walk over all their keys.
#pragma once
#include "core.h"

namespace vt {

template <class C>
struct Chunk {
  const Core<C>& c;
  const Plan& plan;
  const Shape& s;
  const Space& space;

  explicit Chunk(const Core<C>& core) : c(core), plan(core.plan), s(core.s), space(core.space) {}

  void item(const Item& it, Scratch& w) const {
    const Request& r = plan.requests[it.request];
    const int units = s.units(r), passes = s.passes(r);
    float* sums = nullptr;
    if (s.counts(r)) {
      sums = space.floats + space.shares[it.request].units +
             (int64_t(it.head) * units + it.part) * r.s_len;
      memset(sums, 0, sizeof(float) * r.s_len);
    }
    const int end = int(int64_t(it.part + 1) * passes / units);
    for (int i = int(int64_t(it.part) * passes / units); i < end; i++) {
      const int row0 = i * kPassRows;
      const int rows = r.n * s.G - row0 < kPassRows ? r.n * s.G - row0 : kPassRows;
      const bool counted = sums && (row0 + rows - 1) / s.G >= r.n - r.counted;
      if (counted || c.a.out) pass(r, it.head, row0, rows, counted ? sums : nullptr, w);
    }
  }

  // Live tokens that query row `row` of a chunk attends: causal order is order of live tokens.
  int limit(const Request& r, int row) const { return r.nlive - r.n + row / s.G + 1; }

  // One walk over K and V for a few rows. Where they count, all their probabilities are kept.
  void pass(const Request& r, int h, int row0, int rows, float* sums, Scratch& w) const {
    float *m = w.stat, *z = m + rows, *hist = z + rows;  // hist[tile][row]: what p refers to
    for (int i = 0; i < rows; i++) m[i] = -INFINITY, z[i] = 0.f;
    c.pack_query(r, h, row0, rows, w.q);
    memset(w.o, 0, sizeof(float) * rows * s.D);
    const int end = limit(r, row0 + rows - 1);
    int t = r.t0;
    for (; t < r.t1 && plan.tiles[t].live0 < end; t++) {
      const Tile& tile = plan.tiles[t];
      const int n = tile.live1 - tile.live0;
      float* p = w.p + (sums ? int64_t(rows) * tile.s0 : 0);
      c.list_keys(tile, w.rows + 2 * kTileLive);
      c.tile_logits(w.q, rows, tile, h, w.rows + 2 * kTileLive, p);
      for (int i = 0; i < rows; i++) {
        float* x = p + int64_t(i) * tile.ld;
        const int seen = limit(r, row0 + i) - tile.live0;
        for (int k = seen < 0 ? 0 : seen; k < n; k++) x[k] = -INFINITY;
        c.absorb(x, n, m[i], z[i], w.o + int64_t(i) * s.D);
        hist[int64_t(t - r.t0) * rows + i] = m[i];
      }
      if (!c.a.out) continue;
      c.list_rows(tile, w.rows);
      c.tile_values(p, rows, tile, h, w.rows, w.o);
    }
    for (int i = 0; c.a.out && i < rows; i++)
      c.write_out(r.q0 + (row0 + i) / s.G, h * s.G + (row0 + i) % s.G, w.o + int64_t(i) * s.D,
                  1.f / z[i]);
    if (sums) add_sums(r, row0, rows, t, m, z, hist, sums, w.p);
  }

  // sums[live] += p * exp(hist - m) / z over the counted rows of a pass.
  void add_sums(const Request& r, int row0, int rows, int t1, const float* m, const float* z,
                float* hist, float* sums, const float* p) const {
    const int before = (r.n - r.counted) * s.G - row0, first = before < 0 ? 0 : before;
    for (int t = r.t0; t < t1; t++) {
      const Tile& tile = plan.tiles[t];
      float* f = hist + int64_t(t - r.t0) * rows;
      for (int i = first; i < rows; i++)
        f[i] = f[i] == -INFINITY ? 0.f : std::exp(f[i] - m[i]) / z[i];
      for (int k = 0; k < tile.ld - 16; k += 16) {
        const float* x = p + int64_t(rows) * tile.s0 + k;
        V16 sum = load(sums + tile.s0 + k);
        for (int i = first; i < rows; i++)
          sum = fma(broadcast(f + i), load(x + int64_t(i) * tile.ld), sum);
        store(sums + tile.s0 + k, sum);
      }
    }
  }

  // Add up the score sums of a request's heads and runs, in order.
  void finish(int index) const {
    const Request& r = plan.requests[index];
    if (!s.counts(r)) return;
    const Share& sh = space.shares[index];
    const int parts = s.HK * s.units(r);
    for (int k = 0; k < r.s_len; k += 16) {
      V16 x = zero();
      const float* u = space.floats + sh.units + k;
      for (int i = 0; i < parts; i++) x = add(x, load(u + int64_t(i) * r.s_len));
      store(space.floats + sh.sum + k, x);
    }
  }
};

}  // namespace vt
