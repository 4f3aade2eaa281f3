// Survivors and the step's new token fill the holes; rows lose the blocks that go.

#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "arena.h"

namespace vtoken {

// One request's part of an Eviction (vtoken/core/batch.py).
struct Evicted {
  int64_t num_blocks, num_keep, last;
  const int64_t* gone;
  const int32_t* holes;
  int64_t num_gone, num_holes;
};

// Scratch of one `pack`, used for request after request.
struct PackScratch {
  struct Slot {
    int64_t index, local;
    bool operator<(const Slot& o) const { return index < o.index; }
  };
  std::vector<int64_t> cuts;       // old positions that leave their place: those that go, and last
  std::vector<Slot> dead;          // inside the packed prefix, by new physical index
  std::vector<int64_t> displaced;  // live local slots outside of it
};

// Where blocks come to lie: all that stay keep their order, but `last` goes to the end. Between
// two cuts a block table moves as a whole, so none of this is spelled out block by block.
class NewRow {
 public:
  NewRow(const Evicted& ev, const std::vector<int64_t>& cuts) : ev(ev), cuts(cuts) {}

  // -1: it goes.
  int64_t new_pos(int64_t pos) const {
    if (pos == ev.last) return ev.num_keep - 1;
    const auto cut = std::lower_bound(cuts.begin(), cuts.end(), pos);
    return cut != cuts.end() && *cut == pos ? -1 : pos - (cut - cuts.begin());
  }

  int64_t old_pos(int64_t pos) const {
    if (pos == ev.num_keep - 1) return ev.last;
    for (const int64_t cut : cuts) {
      if (cut > pos) break;
      pos++;
    }
    return pos;
  }

  // Calls f(begin, end, new begin) for each part of the old block table that moves as a whole.
  template <class F>
  void for_each_part(F f) const {
    int64_t begin = 0, at = 0;
    for (std::size_t i = 0; i <= cuts.size(); i++) {
      const int64_t end = i < cuts.size() ? cuts[i] : ev.num_blocks;
      f(begin, end, at);
      at += end - begin;
      begin = end + 1;
    }
  }

 private:
  const Evicted& ev;
  const std::vector<int64_t>& cuts;
};

inline bool find_cuts(const Evicted& ev, std::vector<int64_t>& cuts) {
  if (ev.last < 0 || ev.last >= ev.num_blocks) return false;
  cuts.assign(ev.gone, ev.gone + ev.num_gone);
  cuts.insert(std::lower_bound(cuts.begin(), cuts.end(), ev.last), ev.last);
  for (std::size_t i = 1; i < cuts.size(); i++) {
    if (cuts[i] <= cuts[i - 1]) return false;
  }
  return cuts.front() >= 0 && cuts.back() < ev.num_blocks;
}

// Dead slots of kept blocks with a new physical index below `end`: holes, and the unused tail.
inline bool find_dead(const Table& t, const Evicted& ev, const NewRow& block_table, int64_t end,
                      PackScratch& s) {
  s.dead.clear();
  const auto look = [&](int64_t pos, int64_t local) {
    const int64_t new_pos = block_table.new_pos(pos), index = new_pos * t.N + local % t.N;
    if (new_pos >= 0 && index < end) s.dead.push_back({index, local});
  };
  for (int64_t k = 0; k < ev.num_holes; k++) {
    if (!t.is_slot(ev.holes[k]) || t.id_at[ev.holes[k]] >= 0) return false;
    const int32_t pos = t.pos_of[ev.holes[k] / t.N];
    if (pos < 0 || pos >= ev.num_blocks) return false;
    look(pos, ev.holes[k]);
  }
  for (int64_t p = t.n.physical; p < ev.num_blocks * t.N; p++) {
    look(p / t.N, int64_t{t.block_table[p / t.N]} * t.N + p % t.N);
  }
  std::sort(s.dead.begin(), s.dead.end());
  return true;
}

// Live slots in blocks that go, then those at or beyond the packed end, in block table order.
inline void find_displaced(const Table& t, const Evicted& ev, const NewRow& block_table, int64_t end,
                           PackScratch& s) {
  s.displaced.clear();
  const auto look = [&](int64_t pos, int64_t first_offset) {
    const int64_t local = int64_t{t.block_table[pos]} * t.N;
    for (int64_t i = first_offset; i < t.N; i++) {
      if (t.id_at[local + i] >= 0) s.displaced.push_back(local + i);
    }
  };
  for (int64_t g = 0; g < ev.num_gone; g++) look(ev.gone[g], 0);
  for (int64_t p = end / t.N; p < ev.num_keep; p++) {
    look(block_table.old_pos(p), std::max<int64_t>(0, end - p * t.N));
  }
}

// As RequestTable.set_block_table and forget_handles.
inline bool set_block_table(Table& t, const Evicted& ev, const NewRow& block_table, int64_t first_cut) {
  for (int64_t g = 0; g < ev.num_gone; g++) {
    const int32_t handle = t.block_table[ev.gone[g]];
    if (t.live_in[handle] || t.n.free_handles >= t.n.block_room) return false;
    t.pos_of[handle] = -1;
    t.free_handle[t.n.free_handles++] = handle;
  }
  const int32_t last = t.block_table[ev.last];
  block_table.for_each_part([&](int64_t begin, int64_t end, int64_t at) {
    if (at != begin) std::copy(t.block_table + begin, t.block_table + end, t.block_table + at);
  });
  t.block_table[ev.num_keep - 1] = last;
  for (int64_t p = first_cut; p < ev.num_keep; p++) {
    t.pos_of[t.block_table[p]] = static_cast<int32_t>(p);
  }
  t.n.blocks = ev.num_keep;
  t.n.physical = t.n.live;
  return true;
}

// Where `pack` puts its results, as in Packed; each pointer is at the current request's part.
struct PackResult {
  int32_t *num_reclaimed, *new_token_index, *kept_start, *move_start;
  uint8_t* rewrites_block_table;
  int64_t* num_appended;
  int32_t* kept_positions;
  int64_t *source, *destination;
  int64_t num_reused = 0;
};

inline Code pack_one(Table& t, const Evicted& ev, int64_t num_new, PackScratch& s,
                     PackResult& out) {
  if (ev.num_blocks != t.n.blocks || !find_cuts(ev, s.cuts)) return kBadSlot;
  if (!t.has_sound_row()) return kBadSlot;
  const NewRow block_table(ev, s.cuts);
  const bool takes_hole = num_new == 1;
  const int64_t end = t.n.live + takes_hole, capacity = ev.num_keep * t.N;
  if (!find_dead(t, ev, block_table, std::min(end, capacity), s)) return kBadSlot;
  find_displaced(t, ev, block_table, end, s);
  const bool reuses = takes_hole && end <= capacity;
  if (s.dead.size() != s.displaced.size() + reuses) return kUnpaired;

  const int64_t num_moves = static_cast<int64_t>(s.displaced.size());
  for (int64_t k = 0; k < num_moves; k++) {
    out.source[k] = t.slot_of(s.displaced[k]);
    out.destination[k] = t.slot_of(s.dead[k].local);
    t.move(s.displaced[k], s.dead[k].local);
  }
  if (!set_block_table(t, ev, block_table, s.cuts.front())) return kInUse;

  *out.new_token_index = -1;
  if (reuses) {
    const auto [index, local] = s.dead.back();
    if (index != t.n.physical) {  // else it goes to the packed end by itself
      *out.new_token_index = static_cast<int32_t>(index);
      out.num_reused++;
    }
    t.put_next(local);
  }
  const bool changed = ev.num_gone > 0 || ev.last != ev.num_blocks - 1;
  if (changed) {
    block_table.for_each_part([&](int64_t first, int64_t stop, int64_t) {
      std::iota(out.kept_positions, out.kept_positions + (stop - first), static_cast<int32_t>(first));
      out.kept_positions += stop - first;
    });
    *out.kept_positions++ = static_cast<int32_t>(ev.last);
  }
  out.source += num_moves;
  out.destination += num_moves;
  *out.rewrites_block_table++ = changed;
  *out.num_appended++ = num_new - reuses;
  *out.num_reclaimed++ = static_cast<int32_t>(t.n.computed - t.n.physical);
  out.new_token_index++;
  out.kept_start[1] = out.kept_start[0] + static_cast<int32_t>(changed ? ev.num_keep : 0);
  out.move_start[1] = out.move_start[0] + static_cast<int32_t>(num_moves);
  out.kept_start++, out.move_start++;
  return kOk;
}

}  // namespace vtoken
