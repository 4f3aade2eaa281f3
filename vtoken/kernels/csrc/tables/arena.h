// The tables of all requests as the scheduler's arena holds them (vtoken/core/arena.py), one
// request of it, and the codes by which every function says what is wrong instead of writing
// where it must not.
//
// Legend: E requests, N block size (tokens). `rows[e]` is a request's block table of `numbers`.

#pragma once

#include <cstddef>
#include <cstdint>

#include "../describe.h"

namespace vtoken {

// A block table of Arena.numbers: the name here, and in NUMBERS, whose order it is.
#define VTT_NUMBERS(F)                                                                       \
  F(token_base, token_base) F(block_base, block_base)                                        \
  F(token_room, token_room) F(block_room, block_room)                                        \
  F(computed, num_computed_tokens) F(physical, num_physical_tokens)                          \
  F(live, num_live_tokens) F(blocks, num_blocks)                                             \
  F(handles, num_handles) F(free_handles, num_free_handles)                                  \
  F(dead_from, dead_from) F(dead_to, dead_to)
#define VTT_NUMBER(name, python_name) int64_t name;
struct Numbers { VTT_NUMBERS(VTT_NUMBER) };

// Lengths last; id_at has block_size entries a block.
#define VTT_ARENA(F)                                                                         \
  F(Numbers*, numbers) F(int32_t*, index_of) F(int32_t*, live_in_span)                      \
  F(int32_t*, block_table) F(int32_t*, pos_of) F(int32_t*, block_id) F(int32_t*, live_in)            \
  F(int32_t*, free_handle) F(int32_t*, id_at)                                                \
  F(int64_t, num_rows) F(int64_t, num_tokens) F(int64_t, num_blocks) F(int64_t, block_size)
VT_STRUCT(Arena, VTT_ARENA);

constexpr int64_t kSpanTokens = 64;

// What a function returns: code | e << 8. The texts are in vtoken/kernels/tables.py.
enum Code : int64_t {
  kOk = 0,
  kNeedsRoom = 1,   // nothing was done: the request's region is too short, grow it and call again
  kNeedsSpace = 2,  // nothing was done: the buffers of the results are too short
  kNoTable = 3,
  kNoBlock = 4,
  kNotLive = 5,
  kBadSlot = 6,
  kNotPacked = 7,
  kUnpaired = 8,
  kInUse = 9,
  kBadRank = 10,
};

inline int64_t failed(Code code, int64_t e) { return code | e << 8; }

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// One request: as RequestTable, with the same names.
class Table {
 public:
  Table(const Arena& arena, int64_t row_of_numbers)
      : n(arena.numbers[row_of_numbers]),
        N(arena.block_size),
        index_of(arena.index_of + n.token_base),
        live_in_span(arena.live_in_span + n.token_base / kSpanTokens),
        block_table(arena.block_table + n.block_base),
        pos_of(arena.pos_of + n.block_base),
        block_id(arena.block_id + n.block_base),
        live_in(arena.live_in + n.block_base),
        free_handle(arena.free_handle + n.block_base),
        id_at(arena.id_at + n.block_base * N) {}

  // Whether a block table of numbers describes a table that lies inside the arena.
  static bool is_valid(const Arena& arena, int64_t r) {
    if (r < 0 || r >= arena.num_rows) return false;
    const Numbers& n = arena.numbers[r];
    return n.token_base >= 0 && n.token_room >= 0 && n.block_base >= 0 && n.block_room >= 0 &&
           n.token_base + n.token_room <= arena.num_tokens &&
           n.block_base + n.block_room <= arena.num_blocks && n.computed >= 0 &&
           n.computed <= n.token_room && n.blocks >= 0 && n.blocks <= n.block_room &&
           n.handles <= n.block_room && n.free_handles >= 0 && n.free_handles <= n.handles &&
           n.live >= 0 && n.physical >= n.live && n.physical <= n.blocks * arena.block_size;
  }

  bool is_live(int64_t id) const { return id >= 0 && id < n.computed && index_of[id] >= 0; }
  bool is_handle(int64_t handle) const { return handle >= 0 && handle < n.block_room; }
  bool is_slot(int64_t local) const { return local >= 0 && local < n.block_room * N; }

  bool has_sound_row() const {
    bool is_sound = true;  // no way out of the loop: it can be done many blocks at a time
    for (int64_t pos = 0; pos < n.blocks; pos++) is_sound &= is_handle(block_table[pos]);
    return is_sound;
  }

  // Where the id at a physical index lies, -1 for a hole; null: the block table names no block of ours.
  const int32_t* place_of_id(int64_t p) const {
    const int64_t handle = block_table[p / N];
    return is_handle(handle) ? id_at + handle * N + p % N : nullptr;
  }

  // Blocks and ids the region must hold before `new_blocks` are added and `length` is reached.
  bool has_room(int64_t new_blocks, int64_t length) const {
    const int64_t unused = new_blocks > n.free_handles ? new_blocks - n.free_handles : 0;
    return n.blocks + new_blocks <= n.block_room && n.handles + unused <= n.block_room &&
           length <= n.token_room;
  }

  void add_block(int32_t id) {
    const int32_t handle = n.free_handles ? free_handle[--n.free_handles]
                                          : static_cast<int32_t>(n.handles++);
    block_table[n.blocks] = handle;
    pos_of[handle] = static_cast<int32_t>(n.blocks++);
    block_id[handle] = id;
    live_in[handle] = 0;
  }

  // The next logical id lies in this local slot.
  void put_next(int64_t local) {
    const int64_t id = n.computed++;
    index_of[id] = static_cast<int32_t>(local);
    id_at[local] = static_cast<int32_t>(id);
    live_in[local / N]++;
    live_in_span[id / kSpanTokens]++;
    n.live++;
    n.physical++;
  }

  // Returns the local slot that became a hole.
  int32_t evict(int64_t id) {
    const int32_t local = index_of[id];
    index_of[id] = -1;
    id_at[local] = -1;
    live_in[local / N]--;
    live_in_span[id / kSpanTokens]--;
    n.live--;
    return local;
  }

  void move(int64_t source, int64_t destination) {
    const int32_t id = id_at[source];
    id_at[source] = -1;
    id_at[destination] = id;
    index_of[id] = static_cast<int32_t>(destination);
    live_in[source / N]--;
    live_in[destination / N]++;
  }

  int64_t slot_of(int64_t local) const { return int64_t{block_id[local / N]} * N + local % N; }

  // End of the dead run that begins at first_id, or the table's length.
  int64_t first_live(int64_t first_id) {
    if (n.dead_from != first_id) n.dead_from = n.dead_to = first_id;
    while (n.dead_to < n.computed && index_of[n.dead_to] < 0) n.dead_to++;
    return n.dead_to;
  }

  Numbers& n;
  const int64_t N;
  int32_t* const index_of;
  int32_t* const live_in_span;
  int32_t* const block_table;
  int32_t* const pos_of;
  int32_t* const block_id;
  int32_t* const live_in;
  int32_t* const free_handle;
  int32_t* const id_at;
};

}  // namespace vtoken
