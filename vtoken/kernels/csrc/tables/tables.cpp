// What a step does to the tables of many requests: BatchOps (vtoken/core/batch.py) on the arrays
// of an arena, one call for each. No SIMD, no threads, no torch: any C++17 compiler will do.
//
// kNeedsRoom and kNeedsSpace are found out before anything is written, so they can be answered by
// making room and calling again. Every other code is a bug on our side; the caller stops there.

#include "arena.h"
#include "draw.h"
#include "evict.h"
#include "pack.h"
#include "pick.h"

using namespace vtoken;

#define VT_API extern "C" __attribute__((visibility("default")))

namespace {

int64_t first_invalid(const Arena& arena, int64_t E, const int64_t* rows) {
  for (int64_t e = 0; e < E; e++) {
    if (!Table::is_valid(arena, rows[e])) return failed(kNoTable, e);
  }
  return kOk;
}

}  // namespace

VT_API int64_t vtt_sync(const Arena* arena, int64_t E, const int64_t* rows,
                        const int64_t* new_counts, const int32_t* new_ids,
                        const int64_t* lengths) {
  for (int64_t e = 0; e < E; e++) {
    if (!Table::is_valid(*arena, rows[e]) || new_counts[e] < 0) return failed(kNoTable, e);
    const Table t(*arena, rows[e]);
    if (!t.has_room(new_counts[e], lengths[e])) return failed(kNeedsRoom, e);
    const int64_t grown = std::max<int64_t>(0, lengths[e] - t.n.computed);
    if (t.n.physical + grown > (t.n.blocks + new_counts[e]) * t.N) return failed(kNoBlock, e);
    const int64_t last_full = std::min(t.n.blocks, ceil_div(t.n.physical + grown, t.N));
    for (int64_t p = t.n.physical / t.N; p < last_full; p++) {
      if (!t.is_handle(t.block_table[p])) return failed(kBadSlot, e);
    }
    for (int64_t i = 0; i < std::min(new_counts[e], t.n.free_handles); i++) {
      if (!t.is_handle(t.free_handle[t.n.free_handles - 1 - i])) return failed(kBadSlot, e);
    }
  }
  for (int64_t e = 0; e < E; e++) {
    Table t(*arena, rows[e]);
    for (int64_t i = 0; i < new_counts[e]; i++) t.add_block(*new_ids++);
    while (t.n.computed < lengths[e]) {
      const int64_t p = t.n.physical;
      t.put_next(int64_t{t.block_table[p / t.N]} * t.N + p % t.N);
    }
  }
  return kOk;
}

VT_API int64_t vtt_oldest(const Arena* arena, int64_t E, const int64_t* rows,
                          const int64_t* counts, const int64_t* first_ids, const int64_t* end_ids,
                          int64_t* out_ids, int64_t* out_counts) {
  if (const int64_t code = first_invalid(*arena, E, rows)) return code;
  for (int64_t e = 0; e < E; e++) {
    if (first_ids[e] < 0) return failed(kBadRank, e);
    Table t(*arena, rows[e]);
    out_counts[e] = pick_oldest(t, counts[e], first_ids[e], end_ids[e], out_ids);
    out_ids += out_counts[e];
  }
  return kOk;
}

// `ids` and `scores` are the addresses of each request's parts, `sizes` entries long; where `ids`
// is null they are those at the table's first physical indices.
VT_API int64_t vtt_lowest_scored(const Arena* arena, int64_t E, const int64_t* rows,
                                 const int64_t* ids, const int64_t* scores, const int64_t* sizes,
                                 const int64_t* first_ids, const int64_t* end_ids,
                                 const int64_t* counts, int64_t sign, int64_t* out_ids,
                                 int64_t* out_counts) {
  if (const int64_t code = first_invalid(*arena, E, rows)) return code;
  for (int64_t e = 0; e < E; e++) {
    const Table t(*arena, rows[e]);
    if (first_ids[e] < 0) return failed(kBadRank, e);  // -1 stands for a hole
    if (!ids[e] && sizes[e] > t.n.physical) return failed(kBadSlot, e);
    out_counts[e] = pick_lowest(t, reinterpret_cast<const int32_t*>(ids[e]),
                                reinterpret_cast<const float*>(scores[e]), sizes[e], first_ids[e],
                                end_ids[e], counts[e], static_cast<float>(sign), out_ids);
    if (out_counts[e] < 0) return failed(kBadSlot, e);
    out_ids += out_counts[e];
  }
  return kOk;
}

VT_API int64_t vtt_count_below(const Arena* arena, int64_t E, const int64_t* rows,
                               const int64_t* bounds, int64_t* out) {
  if (const int64_t code = first_invalid(*arena, E, rows)) return code;
  for (int64_t e = 0; e < E; e++) out[e] = count_below(Table(*arena, rows[e]), bounds[e]);
  return kOk;
}

VT_API int64_t vtt_at_ranks(const Arena* arena, int64_t E, const int64_t* rows, int64_t* ranks,
                            const int64_t* counts, int64_t* out_ids) {
  if (const int64_t code = first_invalid(*arena, E, rows)) return code;
  for (int64_t e = 0; e < E; e++) {
    if (!pick_ranks(Table(*arena, rows[e]), ranks, counts[e], out_ids))
      return failed(kBadRank, e);
    ranks += counts[e];
    out_ids += counts[e];
  }
  return kOk;
}

// `entropy` is [E, 3]; counts[e] <= sizes[e] < 2^32.
VT_API int64_t vtt_draw(int64_t E, const int64_t* entropy, const int64_t* sizes,
                        const int64_t* counts, int64_t* out) {
  std::vector<int64_t> taken;
  for (int64_t e = 0; e < E; e++) {
    const int64_t seed[3] = {entropy[3 * e], entropy[3 * e + 1], entropy[3 * e + 2]};
    if (counts[e] < 0 || counts[e] > sizes[e] || sizes[e] > UINT32_MAX) return failed(kBadRank, e);
    draw(seed, sizes[e], counts[e], taken, out);
    out += counts[e];
  }
  return kOk;
}

VT_API int64_t vtt_execute(const Arena* arena, int64_t E, const int64_t* rows,
                           const int64_t* counts, const int64_t* ids, int64_t num_new,
                           int64_t space, int64_t* num_blocks, int64_t* num_keep, int64_t* last,
                           int64_t* num_evicted, int32_t* holes, int64_t* gone) {
  if (const int64_t code = first_invalid(*arena, E, rows)) return code;
  int64_t needed = 0;
  for (int64_t e = 0; e < E; e++) needed += Table(*arena, rows[e]).n.blocks;
  if (needed > space) return kNeedsSpace;
  return execute(*arena, E, rows, counts, ids, num_new, num_blocks, num_keep, last, num_evicted,
                 holes, gone);
}

// num_blocks .. hole_counts are an Eviction. `of_requests` gets num_reclaimed and new_token_index
// [E], kept_start and move_start [E + 1], one after another; `totals` the sizes of kept_positions and of
// the moves, and how many tokens took a hole inside the layout.
VT_API int64_t vtt_pack(const Arena* arena, int64_t E, const int64_t* rows, const int64_t* num_new,
                        const int64_t* num_blocks, const int64_t* num_keep, const int64_t* last,
                        const int64_t* gone, const int32_t* holes, const int64_t* hole_counts,
                        int64_t row_space, int64_t move_space, int32_t* of_requests,
                        uint8_t* rewrites_block_table, int64_t* num_appended, int32_t* kept_positions,
                        int64_t* source, int64_t* destination, int64_t* totals) {
  int64_t most_kept = 0, most_moves = 0;
  for (int64_t e = 0; e < E; e++) {
    if (!Table::is_valid(*arena, rows[e])) return failed(kNoTable, e);
    const Table t(*arena, rows[e]);
    if (num_keep[e] < 1 || num_keep[e] > num_blocks[e]) return failed(kBadSlot, e);
    if (num_new[e] == 1 && t.n.computed + 1 > t.n.token_room) return failed(kNeedsRoom, e);
    most_kept += num_keep[e];
    most_moves += hole_counts[e] + t.n.blocks * t.N - t.n.physical;
  }
  if (most_kept > row_space || most_moves > move_space) return kNeedsSpace;

  PackScratch scratch;
  int32_t* const kept_start = of_requests + 2 * E;
  int32_t* const move_start = kept_start + E + 1;
  kept_start[0] = move_start[0] = 0;
  PackResult out{of_requests,  of_requests + E, kept_start, move_start, rewrites_block_table,
                 num_appended, kept_positions,        source,    destination};
  for (int64_t e = 0; e < E; e++) {
    Table t(*arena, rows[e]);
    const Evicted ev{num_blocks[e], num_keep[e],
                     last[e],       gone,
                     holes,         num_blocks[e] - num_keep[e],
                     hole_counts[e]};
    if (const Code code = pack_one(t, ev, num_new[e], scratch, out)) return failed(code, e);
    gone += ev.num_gone;
    holes += ev.num_holes;
  }
  totals[0] = kept_start[E];
  totals[1] = move_start[E];
  totals[2] = out.num_reused;
  return kOk;
}

VT_API const char* vt_describe() {
#define VTT_TELL_NUMBER(name, python_name) " " #python_name
  static const std::string text =
      "variant tables\nspan_tokens " + std::to_string(kSpanTokens) +
      "\nnumbers" VTT_NUMBERS(VTT_TELL_NUMBER) "\n" + VT_TELL_STRUCT(Arena, VTT_ARENA) +
      "functions" VT_TELL_CALL(vtt_sync) VT_TELL_CALL(vtt_oldest) VT_TELL_CALL(vtt_lowest_scored)
          VT_TELL_CALL(vtt_count_below) VT_TELL_CALL(vtt_at_ranks) VT_TELL_CALL(vtt_draw)
              VT_TELL_CALL(vtt_execute) VT_TELL_CALL(vtt_pack);
  return text.c_str();
}
