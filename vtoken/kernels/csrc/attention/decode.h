// Requests with one query: items are tiles, combined by whoever finishes the last one.
#pragma once
#include "core.h"

namespace vt {

template <class C>
struct Decode {
  using T = typename C::T;
  const Core<C>& c;
  const Plan& plan;
  const Shape& s;
  const Space& space;

  explicit Decode(const Core<C>& core) : c(core), plan(core.plan), s(core.s), space(core.space) {}

  // Heads [h0, h1) of one tile, and its running outputs, maxima and sums.
  struct Part {
    const Tile& t;
    int h0, h1;
    float *o, *ml;
  };

  // A tile with few holes is read in steps of a few groups, all heads of them, K then V: the order
  // they have in memory, which long reads like better than a head at a time (about a fifth faster
  // where memory is the limit). A holed tile is taken head by head as a whole: steps would be of
  // uneven length, and mispredicted loop ends cost more than the memory gains. So are scores alone.
  bool in_steps(const Tile& t) const {
    return c.a.out && t.live1 - t.live0 > 16 * (t.g1 - t.g0 - 1);
  }
  int step_end(const Tile& t, int g) const {
    return in_steps(t) && g + s.step < t.g1 ? g + s.step : t.g1;
  }

  void item(const Item& it, const Partial& all, Scratch& w) const {
    const Request& r = plan.requests[it.request];
    const int h0 = it.head * s.HK / s.split, h1 = (it.head + 1) * s.HK / s.split;
    const int64_t first = int64_t(it.part) * s.HQ, packed = int64_t(it.request) * s.HK + h0;
    const Part part{plan.tiles[r.t0 + it.part], h0, h1, all.o + first * s.D, all.ml + first * 2};
    if (w.packed != packed)
      for (int h = h0; h < h1; h++)
        c.pack_query(r, h, 0, s.G, w.q + int64_t(h - h0) * s.G * s.D);
    w.packed = packed;
    for (int hq = h0 * s.G; hq < h1 * s.G; hq++)
      part.ml[2 * hq] = -INFINITY, part.ml[2 * hq + 1] = 0.f;
    memset(part.o + int64_t(h0) * s.G * s.D, 0, sizeof(float) * (h1 - h0) * s.G * s.D);
    c.list_rows(part.t, w.rows);
    for (int g = part.t.g0, g1; g < part.t.g1; g = g1) {
      g1 = step_end(part.t, g);
      const int64_t place = g - plan.first_group(r);
      float* p = s.counts(r) ? all.p + place * s.HQ * 16 : nullptr;
      float* hist = all.hist + place * s.HQ;
      if (in_steps(part.t))
        list_ahead(part.t, g, g1, w);
      else
        c.list_keys(part.t, w.rows + 2 * kTileLive);
      for (int h = h0; h < h1; h++) step(part, g, g1, h, w, p, hist);
    }
  }

  // Lists of a step, shared by all its heads: V rows to bring in while K is read (16 a group), then
  // K vectors to bring in while V is read: of this step (for the next head), of the one after it.
  void list_ahead(const Tile& t, int g0, int g1, Scratch& w) const {
    int64_t *v = w.rows + 2 * kTileLive, *k = v + 16 * kTileGroups;
    for (int g = g0; g < g1; g++) {
      const int from = plan.groups[g].live0 - t.live0;
      const int last = c.live_before(t, g + 1) - t.live0 - 1;
      for (int i = from; i < from + 16; i++) *v++ = w.rows[i < last ? i : last];
    }
    const int width = groups_for(first_run(s.G));
    for (int i = 0; i < 2 * 16 * (g1 - g0); i++) {
      const int g = g0 + i / 16 < t.g1 ? g0 + i / 16 : t.g1 - 1;
      *k++ = c.k_at(plan.groups[g]) + int64_t(i % 16) * width * c.a.k_group;
    }
  }

  // Groups [g, g1) for one head. While K is read this head's V comes in, while V is read the next
  // head's K: one after the other in memory.
  void step(const Part& part, int g, int g1, int h, Scratch& w, float* p, float* hist) const {
    const Tile& t = part.t;
    const int live0 = plan.groups[g].live0, n = c.live_before(t, g1) - live0;
    const bool steps = in_steps(t), last = h + 1 == part.h1;
    const int64_t ld = steps ? 16 * s.step + 16 : t.ld;
    const float* q = w.q + int64_t(h - part.h0) * s.G * s.D;
    float* o = part.o + int64_t(h) * s.G * s.D;
    const int64_t *v_at = w.rows + 2 * kTileLive, *k_at = v_at + 16 * kTileGroups;
    if (steps)
      c.logits(q, s.G, g, g1, h, live0, ld, {c.head(h), v_at, 16, 0}, w.p);
    else
      c.tile_logits(q, s.G, t, h, v_at, w.p);
    for (int i = 0; i < s.G; i++) {
      const int hq = h * s.G + i;
      float *x = w.p + i * ld, *ml = part.ml + 2 * hq;
      c.absorb(x, n, ml[0], ml[1], o + int64_t(i) * s.D);
      if (!p) continue;
      hist[hq] = ml[0];
      float* kept = p + hq * int64_t(aligned(n));
      for (int k = 0; k < n; k += 16) store(kept + k, load(x + k));
    }
    if (!c.a.out) return;
    if (!steps) return c.tile_values(w.p, s.G, t, h, w.rows, o);
    const Ahead<T> k{c.head(last ? part.h0 : h + 1), last ? k_at + 16 * (g1 - g) : k_at,
                     c.a.k_group, c.a.k_group};
    c.values(w.p, s.G, ld, h, w.rows + live0 - t.live0, n, o, k);
  }

  // Combine a request's tiles: outputs, then score sums.
  void finish(int index, const Partial& all, Scratch& w) const {
    const Request& r = plan.requests[index];
    const int tiles = r.t1 - r.t0;
    const size_t heads = aligned(s.HQ);
    float *ml = all.ml, *top = w.p, *inverse = top + heads, *factor = inverse + heads;
    for (int hq = 0; hq < s.HQ; hq++) {
      float m = -INFINITY, z = 0;
      for (int t = 0; t < tiles; t++) m = std::fmax(m, ml[(t * s.HQ + hq) * 2]);
      memset(w.o, 0, sizeof(float) * s.D);
      for (int t = 0; t < tiles; t++) {
        const float* x = ml + (t * s.HQ + hq) * 2;
        const float f = std::exp(x[0] - m);
        z += f * x[1];
        const float* o = all.o + (int64_t(t) * s.HQ + hq) * s.D;
        for (int d = 0; c.a.out && d < s.D; d += 16)
          store(w.o + d, fma(splat(f), load(o + d), load(w.o + d)));
      }
      top[hq] = m;
      inverse[hq] = 1.f / z;
      if (c.a.out) c.write_out(r.q0, hq, w.o, 1.f / z);
    }
    if (!s.counts(r)) return;
    float* sums = space.floats + space.shares[index].sum;
    for (int t = r.t0; t < r.t1; t++)
      for (int g = plan.tiles[t].g0; g < plan.tiles[t].g1; g = step_end(plan.tiles[t], g)) {
        const int64_t place = g - plan.first_group(r);
        for (int hq = 0; hq < s.HQ; hq += 16) {
          V16 x = exp16(sub(load(all.hist + place * s.HQ + hq), load(top + hq)));
          store(factor + hq, mul(x, load(inverse + hq)));
        }
        step_sums(plan.tiles[t], g, all.p + place * s.HQ * 16, factor, sums + place * 16);
      }
  }

  // Score sums of one step: over heads, p * f, with f = exp(hist - top) * inverse.
  void step_sums(const Tile& t, int g, const float* p, const float* f, float* sums) const {
    const int n = c.live_before(t, step_end(t, g)) - plan.groups[g].live0;
    const int64_t ld = aligned(n);
    for (int k = 0; k < n; k += 16) {
      V16 x = zero();
      for (int hq = 0; hq < s.HQ; hq++) x = fma(broadcast(f + hq), load(p + hq * ld + k), x);
      store(sums + k, x);
    }
  }
};

}  // namespace vt
