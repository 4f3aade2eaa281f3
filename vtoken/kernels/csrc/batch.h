// The whole batch: items in order, threads that take the next one, sums into slots.
#pragma once
#include <new>

#include "chunk.h"
#include "decode.h"

namespace vt {

template <class C>
struct Batch {
  using T = typename C::T;
  const Args& a;
  const Plan& plan;
  const Shape& s;
  Space& space;
  Core<C> core;
  Decode<C> decode;
  Chunk<C> chunk;
  std::atomic<int64_t> next_item{0};
  std::atomic<int32_t> next_thread{0};

  Batch(const Args& args, const Shape& shape, Space& sp)
      : a(args), plan(*args.plan), s(shape), space(sp), core{args, *args.plan, shape, sp},
        decode(core), chunk(core) {}

  void run(int threads) {
    list_items();
    if (threads > 1)
      a.parallel([](void* self) { ((Batch*)self)->work(); }, this, unsigned(threads), 0);
    else
      work();
    if (plan.shared_slots)
      for (size_t i = 0; i < plan.requests.size(); i++) scatter(int(i));
  }

  // Chunks first, their last (longest) runs foremost: short items at the end keep threads even.
  void list_items() {
    size_t n = 0;
    for (bool one : {false, true})
      for (size_t i = 0; i < plan.requests.size(); i++) {
        const Request& r = plan.requests[i];
        if (r.n == 0 || (r.n == 1) != one) continue;
        const int parts = one ? r.t1 - r.t0 : units_of(r, s.G), heads = one ? s.split : s.HK;
        new (&space.remaining[i]) std::atomic<int32_t>(parts * heads);
        for (int part = 0; part < parts; part++)
          for (int h = 0; h < heads; h++)
            space.items[n++] = {int32_t(i), h, one ? part : parts - 1 - part};
        if (parts == 0 && a.out)  // nothing to attend: zeros, a sum over no token
          memset((void*)((T*)a.out + r.q0 * a.out_stride), 0, sizeof(T) * s.HQ * s.D);
      }
  }

  // One thread. The pool may give fewer threads than asked for: items are taken, not assigned.
  void work() {
    float* f = (float*)(space.scratch + space.scratch_each * next_thread.fetch_add(1));
    Scratch w{(int64_t*)f, f + space.sq, f + space.so, f + space.sstat, f + space.sp, -1};
    for (;;) {
      const int64_t i = next_item.fetch_add(1, std::memory_order_relaxed);
      if (i >= int64_t(space.num_items)) return;
      const Item& it = space.items[i];
      const bool one = plan.requests[it.request].n == 1;
      if (one) {
        decode.item(it, w);
      } else {
        w.packed = -1;
        chunk.item(it, w);
      }
      if (space.remaining[it.request].fetch_sub(1, std::memory_order_acq_rel) != 1) continue;
      if (one)
        decode.finish(it.request, w);
      else
        chunk.finish(it.request);
      if (!plan.shared_slots) scatter(it.request);
    }
  }

  // step_scores[slot] += the request's sums.
  void scatter(int index) const {
    const Request& r = plan.requests[index];
    if (r.n == 0 || !core.counts(r)) return;
    const float* sum = space.floats + space.shares[index].sum;
    for (int t = r.t0; t < r.t1; t++) {
      const Tile& tile = plan.tiles[t];
      for (int g = tile.g0, g1; g < tile.g1; g = g1) {
        g1 = r.n == 1 ? decode.step_end(tile, g) : tile.g1;
        scatter_groups(g, g1, sum + (r.n == 1 ? (g - plan.first_group(r)) * 16 : tile.s0));
      }
    }
  }

  void scatter_groups(int g0, int g1, const float* sum) const {
    for (int g = g0; g < g1; g++) {
      const Group& gr = plan.groups[g];
      float* dst = a.step_scores + int64_t(gr.block) * plan.block_size + gr.offset;
      const float* src = sum + gr.live0 - plan.groups[g0].live0;
      if (gr.mask == 0xffff)
        store(dst, add(load(dst), load(src)));
      else
        for (unsigned m = gr.mask; m; m &= m - 1) dst[__builtin_ctz(m)] += *src++;
    }
  }
};

}  // namespace vt
