// Victims die, and the blocks to keep are chosen so that the fewest tokens move.

#pragma once

#include <algorithm>
#include <vector>

#include "arena.h"

namespace vtoken {

// A block of a block table that is not full of live tokens.
struct Holed {
  int32_t live, pos;
  bool operator<(const Holed& o) const { return live != o.live ? live < o.live : pos < o.pos; }
  bool operator==(const Holed& o) const { return pos == o.pos; }
};

// Blocks of one block table that are not full, each once, the emptiest first, then the earlier one.
//
// Before the eviction every block was full but for the tail: those that lost a token, and the
// tail, are all there are, and the cost does not grow with the block table.
inline bool find_holed(const Table& t, const int32_t* holes, int64_t count,
                       std::vector<Holed>& out) {
  out.clear();
  for (int64_t k = 0; k < count; k++) {
    const int32_t handle = static_cast<int32_t>(holes[k] / t.N);
    const int32_t pos = t.pos_of[handle];
    if (pos < 0 || pos >= t.n.blocks) return false;
    // Victims lie side by side more often than not.
    if (out.empty() || out.back().pos != pos) out.push_back({t.live_in[handle], pos});
  }
  for (int64_t pos = t.n.physical / t.N; pos < t.n.blocks; pos++) {
    if (!t.is_handle(t.block_table[pos])) return false;
    out.push_back({t.live_in[t.block_table[pos]], static_cast<int32_t>(pos)});
  }
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return true;
}

// The block that is last in the new block table: the emptiest that stays, of equally empty ones the
// latest, so that an untouched block table keeps its order. `gone` is ascending.
inline int64_t choose_last(const Table& t, const std::vector<Holed>& holed, int64_t num_gone,
                           const int64_t* gone) {
  std::size_t i = static_cast<std::size_t>(num_gone);
  if (i < holed.size()) {
    while (i + 1 < holed.size() && holed[i + 1].live == holed[i].live) i++;
    return holed[i].pos;
  }
  int64_t last = t.n.blocks - 1;  // all that stay are full
  while (num_gone > 0 && gone[num_gone - 1] == last) last--, num_gone--;
  return last;
}

// See BatchOps.execute. `holes` has room for all ids, `gone` for all blocks.
inline int64_t execute(const Arena& arena, int64_t E, const int64_t* rows, const int64_t* counts,
                       const int64_t* ids, int64_t num_new, int64_t* num_blocks,
                       int64_t* num_keep, int64_t* last, int64_t* num_evicted, int32_t* holes,
                       int64_t* gone) {
  const int64_t* first_id = ids;
  for (int64_t e = 0; e < E; first_id += counts[e], e++) {  // look before anything is written
    if (!Table::is_valid(arena, rows[e])) return failed(kNoTable, e);
    const Table t(arena, rows[e]);
    if (counts[e] < 1) return failed(kNotLive, e);
    if (t.n.live != t.n.physical) return failed(kNotPacked, e);
    for (int64_t k = 0; k < counts[e]; k++) {
      if (!t.is_live(first_id[k]) || (k && first_id[k] <= first_id[k - 1]))
        return failed(kNotLive, e);
      if (!t.is_slot(t.index_of[first_id[k]])) return failed(kBadSlot, e);
    }
  }
  std::vector<Holed> holed;
  for (int64_t e = 0; e < E; e++) {
    Table t(arena, rows[e]);
    for (int64_t k = 0; k < counts[e]; k++) holes[k] = t.evict(ids[k]);
    const bool is_run = ids[counts[e] - 1] - ids[0] + 1 == counts[e];
    if (is_run && ids[0] == t.n.dead_to) t.n.dead_to += counts[e];
    if (!find_holed(t, holes, counts[e], holed)) return failed(kBadSlot, e);
    num_blocks[e] = t.n.blocks;
    num_keep[e] = std::min(t.n.blocks, ceil_div(t.n.live + num_new, t.N));
    const int64_t num_gone = num_blocks[e] - num_keep[e];
    if (num_gone > static_cast<int64_t>(holed.size())) return failed(kNotPacked, e);
    for (int64_t i = 0; i < num_gone; i++) gone[i] = holed[i].pos;
    std::sort(gone, gone + num_gone);
    last[e] = choose_last(t, holed, num_gone, gone);
    num_evicted[e] = t.n.computed - t.n.live;
    ids += counts[e];
    holes += counts[e];
    gone += num_gone;
  }
  return kOk;
}

}  // namespace vtoken
