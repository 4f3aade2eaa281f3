// Relocation copies and key norms.
#pragma once
#include <atomic>

#include "attention.h"

namespace vt {

// Strides are in cells.
#define VT_CACHE_ARGS(F)                                                                         \
  F(void* const*, layers)    /* base of each layer's [num_blocks, H, N, 2D] tensor */            \
  F(const int64_t*, src)                                                                         \
  F(const int64_t*, dst)     /* not for key norms */                                             \
  F(float*, scores)          /* of each slot, for key norms */                                   \
  F(GompParallel, parallel)  /* null: one thread */                                              \
  F(int64_t, count) F(int64_t, block_stride) F(int64_t, head_stride)                             \
  F(int32_t, num_layers) F(int32_t, num_kv_heads) F(int32_t, head_size) F(int32_t, block_size)   \
  F(int32_t, k_group) F(int32_t, dtype) F(int32_t, num_threads)
VT_STRUCT(CacheArgs, VT_CACHE_ARGS);

// A slot's first key cell and its value cells, in one head.
static inline int64_t k_cell(const CacheArgs& a, int64_t slot) {
  const int64_t b = slot / a.block_size, off = slot % a.block_size;
  return b * a.block_stride + off / a.k_group * a.k_group * a.head_size + off % a.k_group;
}
static inline int64_t v_cell(const CacheArgs& a, int64_t slot) {
  return slot / a.block_size * a.block_stride +
         (a.block_size + slot % a.block_size) * a.head_size;
}

template <class T>
struct Mover {
  const CacheArgs& a;
  std::atomic<int64_t> next_item{0};
  T* const buffers = (T*)Workspace::of_thread().hold(a.num_threads * buffer_cells() * sizeof(T));
  std::atomic<int32_t> next_thread{0};

  size_t buffer_cells() const { return size_t(a.count) * 2 * a.head_size; }

  // Copy slots' cells to the buffer, or from it. Keys are one cell a cache line, so latency is all
  // there is: the next token's are prefetched.
  template <bool kRead>
  void copy(T* kv, const int64_t* slots, T* buffer) const {
    const int64_t D = a.head_size, step = a.k_group;
    for (int64_t i = 0; i < a.count; i++, buffer += 2 * D) {
      const int64_t next = slots[i + 1 < a.count ? i + 1 : i];
      T *k = kv + k_cell(a, slots[i]), *v = kv + v_cell(a, slots[i]), *kn = kv + k_cell(a, next);
      for (int64_t d = 0; d < D; d++) {
        __builtin_prefetch(kn + d * step, kRead ? 0 : 1);
        T &kept = buffer[d], &cell = k[d * step];
        kRead ? kept = cell : cell = kept;
      }
      memcpy(kRead ? buffer + D : v, kRead ? v : buffer + D, D * sizeof(T));
    }
  }

  void work() {
    T* buffer = buffers + next_thread.fetch_add(1) * buffer_cells();
    const int64_t items = int64_t(a.num_layers) * a.num_kv_heads;
    for (int64_t i; (i = next_item.fetch_add(1, std::memory_order_relaxed)) < items;) {
      T* kv = (T*)a.layers[i / a.num_kv_heads] + i % a.num_kv_heads * a.head_stride;
      // All sources are read before the first destination is written: a slot may be both.
      copy<true>(kv, a.src, buffer);
      copy<false>(kv, a.dst, buffer);
    }
  }

  void run() { in_parallel(a.parallel, a.num_threads, [this] { work(); }); }
};

// scores[slot] += sum over heads of the L2 norm of the slot's key, for `count` distinct slots.
template <class C>
static void key_norms(const CacheArgs& a) {
  const int64_t step = a.k_group, D = a.head_size;
  for (int64_t i = 0; i < a.count; i++) {
    const typename C::T* k = (const typename C::T*)a.layers[0] + k_cell(a, a.src[i]);
    float total = 0;
    for (int h = 0; h < a.num_kv_heads; h++, k += a.head_stride) {
      float square[4] = {0, 0, 0, 0};  // four sums: D is a multiple of 16
      for (int64_t d = 0; d < D; d++) {
        const float x = C::get(k[d * step]);
        square[d % 4] += x * x;
      }
      total += std::sqrt(square[0] + square[1] + (square[2] + square[3]));
    }
    a.scores[a.src[i]] += total;
  }
}

}  // namespace vt
