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

// One request's scores, in the order of its slots; the lowest of those that may be named.
//
// A score that can still be among the lowest is first noted with its place alone, while its id is
// on the way from memory. Ids are looked up for many at once, and what there is of them is cut down
// whenever twice as many are there as are wanted; most runs of scores hold none.
class Lowest {
 public:
  Lowest(const Table& t, const int32_t* ids, int64_t first_id, int64_t end_id, int64_t count)
      : t(t), ids(ids), first_id(first_id), end_id(end_id), k(static_cast<std::size_t>(count)) {
    most = 2 * k + 64;
  }

  // Null `ids` are those of the table, at least `size` long. False: its block table is damaged.
  bool look(const float* scores, int64_t size, float sign) {
    for (int64_t p = 0; p < size; p++) {
      while (p % kRun == 0 && p + kRun < size && !has_low(scores + p, sign, bound.key)) p += kRun;
      const float key = sign * scores[p];
      if (!(key <= bound.key)) continue;  // NaN: no score
      if (!note(key, p)) return false;
    }
    return look_up();
  }

  int64_t take(int64_t* out_ids) {
    cut();
    for (std::size_t i = 0; i < found.size(); i++) out_ids[i] = found[i].id;
    std::sort(out_ids, out_ids + found.size());
    return static_cast<int64_t>(found.size());
  }

 private:
  static constexpr int kNoted = 32;

  bool note(float key, int64_t p) {
    const int32_t* at = ids ? ids + p : t.place_of_id(p);
    if (!at) return false;
    __builtin_prefetch(at);
    noted_key[num_noted] = key;
    noted_at[num_noted++] = at;
    return num_noted < kNoted || look_up();
  }

  bool look_up() {
    for (int i = 0; i < num_noted; i++) {
      const Scored it{noted_key[i], *noted_at[i]};
      if (it.id < first_id || it.id >= end_id || bound < it) continue;
      if (ids && !t.is_live(it.id)) continue;  // those of the table are
      found.push_back(it);
      if (found.size() == most) {
        cut();
        bound = found[k - 1];
      }
    }
    num_noted = 0;
    return true;
  }

  void cut() {
    if (found.size() <= k) return;
    std::nth_element(found.begin(), found.begin() + (k - 1), found.end());
    found.resize(k);
  }

  const Table& t;
  const int32_t* ids;
  int64_t first_id, end_id;
  std::size_t k, most;
  Scored bound{std::numeric_limits<float>::infinity(), std::numeric_limits<int32_t>::max()};
  std::vector<Scored> found;
  float noted_key[kNoted];
  const int32_t* noted_at[kNoted];
  int num_noted = 0;
};

// See BatchOps.lowest_scored; -1: the table's block table is damaged.
inline int64_t pick_lowest(const Table& t, const int32_t* ids, const float* scores, int64_t size,
                           int64_t first_id, int64_t end_id, int64_t count, float sign,
                           int64_t* out_ids) {
  if (count <= 0) return 0;
  Lowest lowest(t, ids, first_id, end_id, count);
  return lowest.look(scores, size, sign) ? lowest.take(out_ids) : -1;
}

inline int64_t count_below(const Table& t, int64_t bound) {
  const int64_t end = std::min(std::max<int64_t>(bound, 0), t.n.computed);
  int64_t live = 0;
  for (int64_t c = 0; c < end / kSpanTokens; c++) live += t.live_in_span[c];
  for (int64_t id = end - end % kSpanTokens; id < end; id++) live += t.index_of[id] >= 0;
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
      return id % kSpanTokens == 0 && seen + t.live_in_span[id / kSpanTokens] <= ranks[k];
    };
    while (id < t.n.computed) {
      if (leaps()) {
        seen += t.live_in_span[id / kSpanTokens];
        id += kSpanTokens;
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
