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

#include "micro.h"

namespace vt {

constexpr int kPassRows = 24;    // query rows of a chunk that share one walk over K and V
constexpr int kMaxUnits = 64;    // runs of query rows per (request, KV head), at most
constexpr int kStepBytes = 16384;  // K and V of one head that a decode step reads, about
constexpr int64_t kSmallWork = 1 << 20;  // pairs * heads * head size below which one thread does it

using Body = void (*)(void*);
using GompParallel = void (*)(Body, void*, unsigned, unsigned);

// Mirrored by ctypes in cpp.py. Strides are in cells.
struct Args {
  const Plan* plan;
  const void *query, *kv;
  void* out;           // null: scores only
  float* step_scores;  // one per slot; null: no scores
  void* workspace;
  GompParallel parallel;  // null: one thread
  int64_t workspace_bytes, query_stride, out_stride, block_stride, head_stride;
  int32_t dtype, num_heads, num_kv_heads, head_size, k_group, num_threads;
  float scale, softcap;
};

static inline size_t padded(size_t bytes) { return (bytes + 63) / 64 * 64; }

static inline int passes_of(const Request& r, int G) {
  return (r.n * G + kPassRows - 1) / kPassRows;
}
static inline int units_of(const Request& r, int G) {
  const int passes = passes_of(r, G);
  return passes < kMaxUnits ? passes : kMaxUnits;
}

struct Item {
  int32_t request;
  int32_t head;  // a run of heads (decode), a KV head (chunk)
  int32_t part;  // a tile (decode), a run of passes (chunk)
};

// Places in a thread's lists: V rows of a tile, as many that are only prefetched, and two lists of
// what to prefetch, 16 entries a group.
constexpr int kRowOffsets = 2 * kTileLive + 2 * 16 * kTileGroups;

// Where each request's share of the workspace begins, in floats. `g` counts groups from the
// request's first; a step starts at group g and leaves the places of its other groups empty.
struct Share {
  size_t p;      // decode: probabilities of a step [g][HQ][16 * groups of the step]
  size_t hist;   // decode: the maximum they refer to [g][HQ]
  size_t o;      // decode: partial outputs [tile][HQ][D]
  size_t ml;     // decode: maximum and sum [tile][HQ][2]
  size_t units;  // chunk: score sums [HK][unit][s_len]
  size_t sum;    // score sums of the request: [g][16] (decode), [s_len] (chunk)
};

struct Shape {
  int HQ, HK, G, D;
  int step;   // groups a decode takes at a time
  int split;  // runs of heads a decode tile is divided into
  bool scores;
};

// Carves the workspace; with a null base it only counts.
struct Space {
  std::atomic<int32_t>* remaining;
  Share* shares;
  Item* items;
  float* floats;
  char* scratch;
  size_t num_items = 0, scratch_each = 0, total = 0;
  size_t sq, so, sp, sstat;  // offsets into one thread's scratch, in floats

  Space(const Plan& plan, const Shape& s, int threads, char* base) {
    const size_t R = plan.requests.size();
    size_t at = 0, floats_needed = 0;
    auto take = [&](size_t bytes) {
      size_t here = at;
      at += padded(bytes);
      return base ? base + here : nullptr;
    };
    size_t max_tiles = 0, max_ld = 16 * s.step + 16, max_s = 16;
    bool chunk_scores = false;
    for (const Request& r : plan.requests) {
      num_items += r.n == 0   ? 0
                   : r.n == 1 ? size_t(s.split) * (r.t1 - r.t0)
                              : size_t(s.HK) * units_of(r, s.G);
      if (size_t(r.t1 - r.t0) > max_tiles) max_tiles = r.t1 - r.t0;
      if (size_t(r.max_ld) > max_ld) max_ld = r.max_ld;
      if (r.n > 1 && r.counted && s.scores) {
        chunk_scores = true;
        if (size_t(r.s_len) > max_s) max_s = r.s_len;
      }
    }
    remaining = (std::atomic<int32_t>*)take(R * sizeof(std::atomic<int32_t>));
    shares = (Share*)take(R * sizeof(Share));
    items = (Item*)take(num_items * sizeof(Item));
    auto claim = [&](size_t n) {
      size_t here = floats_needed;
      floats_needed += (n + 15) / 16 * 16;
      return here;
    };
    for (size_t i = 0; i < R; i++) {
      const Request& r = plan.requests[i];
      Share sh{};
      const size_t T = r.t1 - r.t0, groups = plan.num_groups(r);
      const bool counted = s.scores && r.counted;
      if (r.n == 1) {
        if (counted) {
          sh.p = claim(groups * s.HQ * 16);
          sh.hist = claim(groups * s.HQ);
          sh.sum = claim(groups * 16);
        }
        sh.o = claim(T * s.HQ * s.D);
        sh.ml = claim(T * s.HQ * 2);
      } else if (counted) {
        sh.units = claim(size_t(s.HK) * units_of(r, s.G) * r.s_len);
        sh.sum = claim(r.s_len);
      }
      if (base) shares[i] = sh;
    }
    floats = (float*)take(floats_needed * sizeof(float));
    const size_t rows = s.G > kPassRows ? s.G : kPassRows;
    const size_t q_rows = size_t(s.HQ) > rows ? s.HQ : rows;
    sq = kRowOffsets * sizeof(int64_t) / sizeof(float);
    so = sq + q_rows * s.D;
    sstat = so + rows * s.D;
    sp = (sstat + rows * (3 + max_tiles) + 15) / 16 * 16;
    scratch_each = padded((sp + rows * (chunk_scores && max_s > max_ld ? max_s : max_ld)) *
                          sizeof(float));
    scratch = take(scratch_each * threads);
    total = at;
  }
};

}  // namespace vt
