// Survivors and the step's new token fill the holes; rows lose the blocks that go.

#pragma once

#include <algorithm>
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
  std::vector<int32_t> kept, new_pos, old_row;
  std::vector<Slot> dead;         // inside the packed prefix, by new physical index
  std::vector<int64_t> displaced;  // live local slots outside of it
};

// Spells out the new row: old position at each new one, and the other way round (-1: goes).
inline bool spell_row(const Evicted& ev, PackScratch& s) {
  if (ev.last < 0 || ev.last >= ev.num_blocks) return false;
  s.kept.clear();
  s.new_pos.assign(ev.num_blocks, -1);
  int64_t g = 0;
  for (int32_t pos = 0; pos < ev.num_blocks; pos++) {
    if (g < ev.num_gone && ev.gone[g] == pos) {
      g++;
    } else if (pos != ev.last) {
      s.new_pos[pos] = static_cast<int32_t>(s.kept.size());
      s.kept.push_back(pos);
    }
  }
  s.new_pos[ev.last] = static_cast<int32_t>(s.kept.size());
  s.kept.push_back(static_cast<int32_t>(ev.last));
  return g == ev.num_gone && static_cast<int64_t>(s.kept.size()) == ev.num_keep;
}

// Dead slots of kept blocks with a new physical index below `end`: holes, and the unused tail.
inline bool find_dead(const Table& t, const Evicted& ev, int64_t end, PackScratch& s) {
  s.dead.clear();
  const auto look = [&](int64_t pos, int64_t local) {
    const int64_t index = int64_t{s.new_pos[pos]} * t.N + local % t.N;
    if (s.new_pos[pos] >= 0 && index < end) s.dead.push_back({index, local});
  };
  for (int64_t k = 0; k < ev.num_holes; k++) {
    if (!t.is_slot(ev.holes[k]) || t.id_at[ev.holes[k]] >= 0) return false;
    const int32_t pos = t.pos_of[ev.holes[k] / t.N];
    if (pos < 0 || pos >= ev.num_blocks) return false;
    look(pos, ev.holes[k]);
  }
  for (int64_t p = t.n.physical; p < ev.num_blocks * t.N; p++) {
    look(p / t.N, int64_t{t.row[p / t.N]} * t.N + p % t.N);
  }
  std::sort(s.dead.begin(), s.dead.end());
  return true;
}

// Live slots in blocks that go, then those at or beyond the packed end, in row order.
inline void find_displaced(const Table& t, const Evicted& ev, int64_t end, PackScratch& s) {
  s.displaced.clear();
  const auto look = [&](int64_t pos, int64_t first_offset) {
    const int64_t local = int64_t{t.row[pos]} * t.N;
    for (int64_t i = first_offset; i < t.N; i++) {
      if (t.id_at[local + i] >= 0) s.displaced.push_back(local + i);
    }
  };
  for (int64_t g = 0; g < ev.num_gone; g++) look(ev.gone[g], 0);
  for (int64_t p = end / t.N; p < ev.num_keep; p++) {
    look(s.kept[p], std::max<int64_t>(0, end - p * t.N));
  }
}

// As RequestTable.set_row and forget_handles.
inline bool set_row(Table& t, const Evicted& ev, PackScratch& s) {
  s.old_row.assign(t.row, t.row + ev.num_blocks);
  for (int64_t g = 0; g < ev.num_gone; g++) {
    const int32_t handle = s.old_row[ev.gone[g]];
    if (t.live_in[handle] || t.n.free_handles >= t.n.block_room) return false;
    t.pos_of[handle] = -1;
    t.free_handle[t.n.free_handles++] = handle;
  }
  for (int64_t p = 0; p < ev.num_keep; p++) {
    t.row[p] = s.old_row[s.kept[p]];
    t.pos_of[t.row[p]] = static_cast<int32_t>(p);
  }
  t.n.blocks = ev.num_keep;
  t.n.physical = t.n.live;
  return true;
}

// Where `pack` puts its results, as in Packed; each pointer is at the current request's part.
struct PackResult {
  int32_t *num_reclaimed, *new_token_index, *row_start, *move_start;
  uint8_t* rewrites_row;
  int64_t* num_appended;
  int32_t* row_kept;
  int64_t *source, *destination;
  int64_t num_reused = 0;
};

inline Code pack_one(Table& t, const Evicted& ev, int64_t num_new, PackScratch& s,
                     PackResult& out) {
  if (ev.num_blocks != t.n.blocks || !spell_row(ev, s)) return kBadSlot;
  for (int64_t pos = 0; pos < ev.num_blocks; pos++) {
    if (!t.is_handle(t.row[pos])) return kBadSlot;
  }
  const bool takes_hole = num_new == 1;
  const int64_t end = t.n.live + takes_hole, capacity = ev.num_keep * t.N;
  if (!find_dead(t, ev, std::min(end, capacity), s)) return kBadSlot;
  find_displaced(t, ev, end, s);
  const bool reuses = takes_hole && end <= capacity;
  if (s.dead.size() != s.displaced.size() + reuses) return kUnpaired;

  const int64_t num_moves = static_cast<int64_t>(s.displaced.size());
  for (int64_t k = 0; k < num_moves; k++) {
    out.source[k] = t.slot_of(s.displaced[k]);
    out.destination[k] = t.slot_of(s.dead[k].local);
    t.move(s.displaced[k], s.dead[k].local);
  }
  if (!set_row(t, ev, s)) return kInUse;

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
  if (changed) out.row_kept = std::copy(s.kept.begin(), s.kept.end(), out.row_kept);
  out.source += num_moves;
  out.destination += num_moves;
  *out.rewrites_row++ = changed;
  *out.num_appended++ = num_new - reuses;
  *out.num_reclaimed++ = static_cast<int32_t>(t.n.computed - t.n.physical);
  out.new_token_index++;
  out.row_start[1] = out.row_start[0] + static_cast<int32_t>(changed ? ev.num_keep : 0);
  out.move_start[1] = out.move_start[0] + static_cast<int32_t>(num_moves);
  out.row_start++, out.move_start++;
  return kOk;
}

}  // namespace vtoken
