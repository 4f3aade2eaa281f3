// What one step's attention must read, request by request: live groups of 16 tokens, in tiles.
//
// A plan holds indices alone (no pointers, no strides), so one plan serves every layer of a step.
//
//   physical  |....16....|....16....|....16....|....16....|   a group: 16 tokens of one block
//   mask        ffff        0a01       0000        8fff       wholly dead groups are dropped
//   live      |----16----|--3--|          |----13----|        `live0` counts live tokens before
//   tile      |<------------ up to 256 live tokens ------>|   one work item of a decode
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "../describe.h"

namespace vt {

constexpr int kGroup = 16;       // tokens
constexpr int kTileLive = 256;   // live tokens in a tile, at most
constexpr int kTileGroups = 64;  // groups in a tile, at most

enum PlanError { kPlanOk = 0, kTooFewKeys = 1, kDeadInChunk = 2, kBadBlock = 3, kBadStart = 4 };

struct Group {
  int32_t block, offset;  // first token of the group
  int32_t live0;          // live tokens of the request before it
  uint32_t mask;          // live bits of its 16 tokens, never zero
};

// Probabilities of a tile are stored as [row][ld]; `s0` is the sum of `ld` over earlier tiles, so
// that `rows * s0` floats come before it. The 16 spare floats of a row take what packed stores
// write beyond its end.
struct Tile {
  int32_t g0, g1;        // range in Plan::groups
  int32_t live0, live1;  // range of live tokens of the request
  int32_t s0, ld;
};

struct Request {
  int32_t q0, n;       // rows of the query tensor
  int32_t nlive;       // tokens attended by the last query
  int32_t counted;     // the last `counted` queries enter the scores
  int32_t t0, t1;      // range in Plan::tiles
  int32_t s_len, max_ld;
};

struct Plan {
  int block_size = 0;
  int max_block = -1;        // largest block id read
  int num_queries = 0;       // query rows read
  int64_t pairs = 0;         // query-key pairs, about
  bool shared_slots = false;  // a block belongs to two requests: scores must be added in order
  std::vector<Group> groups;
  std::vector<Tile> tiles;
  std::vector<Request> requests;

  int first_group(const Request& r) const { return r.t0 < r.t1 ? tiles[r.t0].g0 : 0; }
  int num_groups(const Request& r) const {
    return r.t0 < r.t1 ? tiles[r.t1 - 1].g1 - tiles[r.t0].g0 : 0;
  }
};

// What a plan is made from; `live` (one number for each request) and what follows are results.
#define VT_PLAN_ARGS(F)                                                                       \
  F(const int32_t*, block_table) F(const int32_t*, seq_lens)                                  \
  F(const int32_t*, query_start_loc)                                                          \
  F(const uint64_t*, mask)  /* bit i of a row = physical index i; null: all live */           \
  F(int64_t, table_stride) F(int64_t, mask_stride)                                            \
  F(int32_t, num_requests) F(int32_t, table_width) F(int32_t, block_size)                     \
  F(int32_t, score_queries) /* that count, the last ones of a request; negative: all */       \
  F(int32_t, error) F(int32_t, max_block) F(int32_t, num_queries) F(int32_t*, live)
VT_STRUCT(PlanArgs, VT_PLAN_ARGS);

static inline void close_tile(Plan& p, Request& r, Tile& t, int live) {
  t.g1 = int(p.groups.size());
  t.live1 = live;
  if (t.g0 == t.g1) return;
  t.ld = (t.live1 - t.live0 + 15) / 16 * 16 + 16;
  t.s0 = r.s_len;
  r.s_len += t.ld;
  if (t.ld > r.max_ld) r.max_ld = t.ld;
  p.tiles.push_back(t);
}

static int plan_request(Plan& p, const PlanArgs& in, int index) {
  const int N = in.block_size, len = in.seq_lens[index];
  Request r{};
  r.q0 = in.query_start_loc[index];
  r.n = in.query_start_loc[index + 1] - r.q0;
  r.t0 = r.t1 = int(p.tiles.size());
  if (r.n < 0 || r.q0 < 0) return kBadStart;
  if (r.q0 + r.n > p.num_queries) p.num_queries = r.q0 + r.n;
  if (r.n == 0) {
    p.requests.push_back(r);
    return kPlanOk;
  }
  if (len < r.n) return kTooFewKeys;
  if ((len + N - 1) / N > in.table_width) return kBadBlock;
  const int want = in.score_queries;
  r.counted = want < 0 || want > r.n ? r.n : want;

  const int32_t* table = in.block_table + index * in.table_stride;
  const uint64_t* mask = in.mask ? in.mask + index * in.mask_stride : nullptr;
  Tile t{};
  t.g0 = int(p.groups.size());
  int live = 0;
  for (int i = 0, off = 0, b = 0; i < len; i += kGroup, off += kGroup) {
    if (off == N) off = 0, b++;
    unsigned bits = mask ? unsigned(mask[i / 64] >> (i % 64)) & 0xffff : 0xffff;
    if (len - i < kGroup) bits &= (1u << (len - i)) - 1;
    // The chunk's own tokens are the newest `n` physical indices; causal order rests on it.
    if (r.n > 1 && i + kGroup > len - r.n) {
      unsigned own = i >= len - r.n ? 0xffff : 0xffff & ~((1u << (len - r.n - i)) - 1);
      if (len - i < kGroup) own &= (1u << (len - i)) - 1;
      if ((bits & own) != own) return kDeadInChunk;
    }
    if (!bits) continue;
    const int count = __builtin_popcount(bits);
    if (live + count - t.live0 > kTileLive || int(p.groups.size()) - t.g0 == kTileGroups) {
      close_tile(p, r, t, live);
      t.g0 = int(p.groups.size());
      t.live0 = live;
    }
    if (table[b] < 0) return kBadBlock;
    if (table[b] > p.max_block) p.max_block = table[b];
    p.groups.push_back({table[b], off, live, bits});
    live += count;
  }
  close_tile(p, r, t, live);
  r.nlive = live;
  r.t1 = int(p.tiles.size());
  p.pairs += int64_t(live) * r.n;
  p.requests.push_back(r);
  return kPlanOk;
}

// Whether two requests read one block.
static bool has_shared_blocks(const Plan& p) {
  std::vector<int32_t> owner(std::size_t(p.max_block + 1), -1);
  for (std::size_t i = 0; i < p.requests.size(); i++)
    for (int t = p.requests[i].t0; t < p.requests[i].t1; t++)
      for (int g = p.tiles[t].g0; g < p.tiles[t].g1; g++) {
        int32_t& o = owner[p.groups[g].block];
        if (o >= 0 && o != int32_t(i)) return true;
        o = int32_t(i);
      }
  return false;
}

static bool make_plan(Plan& p, PlanArgs& in) {
  p.block_size = in.block_size;
  p.requests.reserve(in.num_requests);
  int64_t most = 0;
  const int64_t longest = int64_t(in.table_width) * in.block_size;
  for (int i = 0; i < in.num_requests; i++)
    most += std::min(std::max<int64_t>(in.seq_lens[i], 0), longest) / kGroup + 1;
  p.groups.reserve(std::size_t(most));
  for (int i = 0; i < in.num_requests; i++)
    if (const int error = plan_request(p, in, i)) return in.error = error | i << 8, false;
  p.shared_slots = has_shared_blocks(p);
  in.max_block = p.max_block;
  in.num_queries = p.num_queries;
  for (int i = 0; i < in.num_requests; i++) in.live[i] = p.requests[i].nlive;
  return true;
}

}  // namespace vt
