// Naming victims: the oldest, the lowest scored, those of given ranks.

#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "arena.h"

namespace vtoken {

// See BatchOps.oldest. `out_ids` has room for all counts.
inline int64_t pick_oldest(Table& t, int64_t count, int64_t first_id, int64_t end_id,
                           int64_t* out_ids) {
  int64_t found = 0;
  if (count <= 0) return 0;
  const int64_t end = std::min(end_id, t.n.computed);
  for (int64_t id = t.first_live(first_id); id < end && found < count; id++) {
    if (t.index_of[id] >= 0) out_ids[found++] = id;
  }
  return found;
}

struct Scored {
  float key;
  int32_t id;
  bool operator<(const Scored& o) const { return key != o.key ? key < o.key : id < o.id; }
};

constexpr int64_t kRun = 16;  // scores

// Whether one of a run's scores is no more than `bound`; without branches, so that it vectorises.
inline bool has_low(const float* scores, float sign, float bound) {
  int low = 0;
  for (int64_t i = 0; i < kRun; i++) low |= sign * scores[i] <= bound;  // a NaN is not
  return low != 0;
}

// See BatchOps.lowest_scored: one pass in the order of the report, which is that of the slots.
// What can still be among the lowest is gathered and cut down whenever twice as many are there;
// most runs hold none of them.
inline int64_t pick_lowest(const Table& t, const int32_t* ids, const float* scores, int64_t size,
                           int64_t first_id, int64_t end_id, int64_t count, float sign,
                           std::vector<Scored>& lowest, int64_t* out_ids) {
  if (count <= 0) return 0;
  const std::size_t k = static_cast<std::size_t>(count), most = 2 * k + 64;
  Scored bound{std::numeric_limits<float>::infinity(), std::numeric_limits<int32_t>::max()};
  lowest.clear();
  for (int64_t p = 0; p < size; p++) {
    while (p % kRun == 0 && p + kRun < size && !has_low(scores + p, sign, bound.key)) p += kRun;
    const float key = sign * scores[p];
    if (!(key <= bound.key)) continue;  // NaN: no score
    const Scored it{key, ids[p]};
    if (it.id < first_id || it.id >= end_id || bound < it || !t.is_live(it.id)) continue;
    lowest.push_back(it);
    if (lowest.size() == most) {
      std::nth_element(lowest.begin(), lowest.begin() + (k - 1), lowest.end());
      lowest.resize(k);
      bound = lowest[k - 1];
    }
  }
  if (lowest.size() > k) {
    std::nth_element(lowest.begin(), lowest.begin() + (k - 1), lowest.end());
    lowest.resize(k);
  }
  for (std::size_t i = 0; i < lowest.size(); i++) out_ids[i] = lowest[i].id;
  std::sort(out_ids, out_ids + lowest.size());
  return static_cast<int64_t>(lowest.size());
}

inline int64_t count_below(const Table& t, int64_t bound) {
  const int64_t end = std::min(std::max<int64_t>(bound, 0), t.n.computed);
  int64_t live = 0;
  for (int64_t c = 0; c < end / kChunkTokens; c++) live += t.live_in_chunk[c];
  for (int64_t id = end - end % kChunkTokens; id < end; id++) live += t.index_of[id] >= 0;
  return live;
}

// See BatchOps.at_ranks; sorts the ranks. False: a rank that no live id has.
inline bool pick_ranks(const Table& t, int64_t* ranks, int64_t count, int64_t* out_ids) {
  std::sort(ranks, ranks + count);
  int64_t id = 0, seen = 0;  // live ids below `id`
  for (int64_t k = 0; k < count; k++) {
    if (ranks[k] < 0 || ranks[k] >= t.n.live) return false;
    if (ranks[k] < seen) return false;  // twice the same
    const auto leaps = [&] {
      return id % kChunkTokens == 0 && seen + t.live_in_chunk[id / kChunkTokens] <= ranks[k];
    };
    while (id < t.n.computed) {
      if (leaps()) {
        seen += t.live_in_chunk[id / kChunkTokens];
        id += kChunkTokens;
      } else if (t.index_of[id++] >= 0 && seen++ == ranks[k]) {
        out_ids[k] = id - 1;
        break;
      }
    }
    if (seen != ranks[k] + 1) return false;
  }
  return true;
}

}  // namespace vtoken
