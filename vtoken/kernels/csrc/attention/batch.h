// The whole batch: items in order, threads that take the next one, sums into slots.
#pragma once
#include <sched.h>

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
  std::atomic_flag busy = ATOMIC_FLAG_INIT;  // guards the list of free buffers
  int num_free;

  Batch(const Args& args, const Shape& shape, Space& sp)
      : a(args), plan(*args.plan), s(shape), space(sp), core{args, *args.plan, shape, sp},
        decode(core), chunk(core) {}

  void run(int threads) {
    for (num_free = 0; num_free < threads; num_free++) space.free_buffers[num_free] = num_free;
    list_items();
    in_parallel(a.parallel, threads, [this] { work(); });
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
        const int parts = one ? r.t1 - r.t0 : s.units(r), heads = one ? s.split : s.HK;
        new (&space.remaining[i]) std::atomic<int32_t>(parts * heads);
        new (&space.buffer[i]) std::atomic<int32_t>(-1);
        for (int part = 0; part < parts; part++)
          for (int h = 0; h < heads; h++)
            space.items[n++] = {int32_t(i), h, one ? part : parts - 1 - part};
        if (parts == 0 && a.out)  // nothing to attend: zeros, a sum over no token
          memset((void*)((T*)a.out + r.q0 * a.out_stride), 0, sizeof(T) * s.HQ * s.D);
      }
  }

  // One thread of maybe fewer than were asked for: items are taken, not assigned.
  void work() {
    float* f = (float*)(space.scratch + space.scratch_each * next_thread.fetch_add(1));
    Scratch w{(int64_t*)f, f + space.sq, f + space.so, f + space.sstat, f + space.sp, -1};
    const int64_t items = space.num_items;
    for (int64_t i; (i = next_item.fetch_add(1, std::memory_order_relaxed)) < items;) {
      const Item& it = space.items[i];
      if (plan.requests[it.request].n == 1) {
        decode_item(it, w);
      } else {
        w.packed = -1;
        chunk.item(it, w);
        if (last_of(it.request)) chunk.finish(it.request), scatter_now(it.request);
      }
    }
  }

  bool last_of(int request) {
    return space.remaining[request].fetch_sub(1, std::memory_order_acq_rel) == 1;
  }

  // Partial results are kept in few buffers, used again and again: they stay in the cache while K
  // and V stream by.
  void decode_item(const Item& it, Scratch& w) {
    std::atomic<int32_t>& buffer = space.buffer[it.request];
    if (it.part == 0 && it.head == 0) {
      int32_t mine;
      locked([&] { mine = space.free_buffers[--num_free]; });
      buffer.store(mine, std::memory_order_release);
    }
    int32_t which;  // items are taken in order: the first one is in some thread's hands already
    wait_until([&] { return (which = buffer.load(std::memory_order_acquire)) >= 0; });
    const Partial all(plan, plan.requests[it.request], s,
                      space.partials + space.partial_each * which);
    decode.item(it, all, w);
    if (!last_of(it.request)) return;
    decode.finish(it.request, all, w);
    locked([&] { space.free_buffers[num_free++] = which; });
    scatter_now(it.request);
  }

  // Waits are for a few instructions of another thread, unless it has lost its processor.
  template <class F>
  static void wait_until(F ready) {
    for (int spins = 0; !ready(); spins++) spins < 1000 ? _mm_pause() : (void)sched_yield();
  }
  template <class F>
  void locked(F f) {
    wait_until([&] { return !busy.test_and_set(std::memory_order_acquire); });
    f();
    busy.clear(std::memory_order_release);
  }

  void scatter_now(int request) const {
    if (!plan.shared_slots) scatter(request);
  }

  // step_scores[slot] += the request's sums.
  void scatter(int index) const {
    const Request& r = plan.requests[index];
    if (r.n == 0 || !s.counts(r)) return;
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
