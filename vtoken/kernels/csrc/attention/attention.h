// Attention of a planned batch over live tokens, with the score sums, in two kinds of work item.
//
//   decode item   (request, tile of <= 256 live tokens, heads), one query: G rows a head
//   chunk item    (request, KV head, run of query rows), several queries: all tiles, rows in passes
//
// In both, the logits of a tile are computed for whole 16-token groups and stored packed, so that
// everything after (maximum, exp, PV, score sums) costs what the live tokens cost, and whatever a
// dead slot holds, NaN or inf, goes no further than a register lane that is never stored.
// The last worker to finish an item of a request combines that request in a fixed order: results
// do not depend on the number of threads.
#pragma once
#include <atomic>
#include <cstddef>
#include <memory>

#include "micro.h"

namespace vt {

constexpr int kPassRows = 24;    // query rows of a chunk that share one walk over K and V
constexpr int kMaxUnits = 64;    // runs of query rows per (request, KV head), at most
constexpr int kStepBytes = 16384;  // K and V of one head that a decode step reads, about
constexpr int64_t kSmallWork = 1 << 17;  // pairs * heads * head size below which one thread does it

using Body = void (*)(void*);
using GompParallel = void (*)(Body, void*, unsigned, unsigned);

// Run `work` on several threads of a pool, or here. The pool may give fewer than asked for.
template <class F>
static inline void in_parallel(GompParallel parallel, int threads, F work) {
  if (threads > 1 && parallel)
    parallel([](void* f) { (*(F*)f)(); }, &work, unsigned(threads), 0);
  else
    work();
}

// Memory of the calling thread, kept from call to call. What was in it is lost when it grows.
struct Workspace {
  std::unique_ptr<char[]> memory;
  size_t size = 0;

  static Workspace& of_thread() {
    static thread_local Workspace kept;
    return kept;
  }
  char* data() const { return (char*)((uintptr_t(memory.get()) + 63) / 64 * 64); }
  char* hold(size_t bytes) {
    if (size < bytes) {
      size = bytes + bytes / 4;  // lengths grow by a token a step, allocations should not
      memory.reset(new char[size + 64]);
    }
    return data();
  }
};

// Strides are in cells.
#define VT_ARGS(F)                                                                              \
  F(const Plan*, plan) F(const void*, query) F(const void*, kv)                                 \
  F(void*, out)              /* null: scores only */                                            \
  F(float*, step_scores)     /* one per slot; null: no scores */                                \
  F(GompParallel, parallel)  /* null: one thread */                                             \
  F(int64_t, query_stride) F(int64_t, out_stride)                                               \
  F(int64_t, block_stride) F(int64_t, head_stride)                                              \
  F(int32_t, dtype) F(int32_t, num_heads) F(int32_t, num_kv_heads) F(int32_t, head_size)        \
  F(int32_t, k_group) F(int32_t, num_threads) F(float, scale) F(float, softcap)
VT_STRUCT(Args, VT_ARGS);

struct Item {
  int32_t request;
  int32_t head;  // a run of heads (decode), a KV head (chunk)
  int32_t part;  // a tile (decode), a run of passes (chunk)
};

// Places in a thread's lists: V rows of a tile, as many that are only prefetched, and two lists of
// what to prefetch, 16 entries a group.
constexpr int kRowOffsets = 2 * kTileLive + 2 * 16 * kTileGroups;

struct Shape {
  int HQ, HK, G, D;
  int step;   // groups a decode takes at a time
  int split;  // runs of heads a decode tile is divided into
  bool scores;

  bool counts(const Request& r) const { return scores && r.counted; }
  int passes(const Request& r) const { return (r.n * G + kPassRows - 1) / kPassRows; }
  // Runs of passes of a chunk, each with sums of its own: few enough for 64 MiB of them.
  int units(const Request& r) const {
    const int64_t most = counts(r) ? (int64_t(1) << 24) / (int64_t(HK) * r.s_len) : kMaxUnits;
    const int units = passes(r) < kMaxUnits ? passes(r) : kMaxUnits;
    return units <= most ? units : most < 1 ? 1 : int(most);
  }
};

static inline size_t aligned(size_t floats) { return (floats + 15) / 16 * 16; }

// What a decode keeps until its last item is done. `g` counts groups from the request's first; a
// step starts at group g and leaves the places of its other groups empty.
struct Partial {
  float* p;     // probabilities of a step [g][HQ][16 * groups of the step]
  float* hist;  // the maximum they refer to [g][HQ]
  float* o;     // outputs [tile][HQ][D]
  float* ml;    // maximum and sum [tile][HQ][2]
  size_t size;  // of all, in floats

  Partial(const Plan& plan, const Request& r, const Shape& s, float* base) {
    const size_t groups = s.counts(r) ? plan.num_groups(r) : 0, tiles = r.t1 - r.t0;
    p = base;
    hist = p + aligned(groups * s.HQ * 16);
    o = hist + aligned(groups * s.HQ + 16);  // read 16 at a time
    ml = o + aligned(tiles * s.HQ * s.D);
    size = size_t(ml - base) + aligned(tiles * s.HQ * 2);
  }
};

// Where a request's sums lie, in floats.
struct Share {
  size_t units;  // chunk: of each run of passes [HK][unit][s_len]
  size_t sum;    // of the request: [g][16] (decode), [s_len] (chunk)
};

// Carves the workspace. Where that is shorter than `total`, nothing may be used.
struct Space {
  std::atomic<int32_t>* remaining;  // items of a request that are not done
  std::atomic<int32_t>* buffer;     // where its Partial is, -1: nowhere yet
  int32_t* free_buffers;
  Share* shares;
  Item* items;
  float *floats, *partials;
  char* scratch;
  size_t num_items = 0, partial_each = 0, scratch_each = 0, total = 0;
  size_t sq, so, sp, sstat;  // offsets into one thread's scratch, in floats

  Space(const Plan& plan, const Shape& s, int threads, const Workspace& memory) {
    char* const base = memory.data();
    const size_t R = plan.requests.size();
    size_t at = 0, sums = 0;
    auto take = [&](size_t bytes) {
      size_t here = at;
      at += (bytes + 63) / 64 * 64;
      return at <= memory.size ? base + here : nullptr;
    };
    auto claim = [&](size_t n) {
      size_t here = sums;
      sums += aligned(n);
      return here;
    };
    for (const Request& r : plan.requests) num_items += items_of(r, s);
    remaining = (std::atomic<int32_t>*)take(R * sizeof(std::atomic<int32_t>));
    buffer = (std::atomic<int32_t>*)take(R * sizeof(std::atomic<int32_t>));
    free_buffers = (int32_t*)take(threads * sizeof(int32_t));
    shares = (Share*)take(R * sizeof(Share));
    items = (Item*)take(num_items * sizeof(Item));
    size_t max_tiles = 0, width = 16 * s.step + 16;
    for (size_t i = 0; i < R; i++) {
      const Request& r = plan.requests[i];
      Share sh{};
      if (r.n == 1) {
        const size_t size = Partial(plan, r, s, nullptr).size;
        if (size > partial_each) partial_each = size;
        if (s.counts(r)) sh.sum = claim(size_t(plan.num_groups(r)) * 16);
      } else if (r.n > 1 && s.counts(r)) {
        sh.units = claim(size_t(s.HK) * s.units(r) * r.s_len);
        sh.sum = claim(r.s_len);
        if (size_t(r.s_len) > width) width = r.s_len;
      }
      if (size_t(r.max_ld) > width) width = r.max_ld;
      if (size_t(r.t1 - r.t0) > max_tiles) max_tiles = r.t1 - r.t0;
      if (shares) shares[i] = sh;
    }
    floats = (float*)take(sums * sizeof(float));
    // A request in flight has an item in some thread's hands: as many as there are threads.
    partials = (float*)take(partial_each * threads * sizeof(float));
    const size_t rows = s.G > kPassRows ? s.G : kPassRows;
    const size_t q_rows = size_t(s.HQ) > rows ? s.HQ : rows;
    sq = kRowOffsets * sizeof(int64_t) / sizeof(float);
    so = sq + q_rows * s.D;
    sstat = so + rows * s.D;
    sp = aligned(sstat + rows * (2 + max_tiles));
    const size_t p_floats = rows * width, heads = 3 * aligned(s.HQ);
    scratch_each = (sp + aligned(p_floats > heads ? p_floats : heads)) * sizeof(float);
    scratch = take(scratch_each * threads);
    total = at;
  }

  static size_t items_of(const Request& r, const Shape& s) {
    if (r.n == 0) return 0;
    return r.n == 1 ? size_t(s.split) * (r.t1 - r.t0) : size_t(s.HK) * s.units(r);
  }
};

}  // namespace vt
