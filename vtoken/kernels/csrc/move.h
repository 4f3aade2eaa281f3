// Relocation copies and key norms: cells are copied as raw bits, whatever their type.
#pragma once
#include <atomic>

#include "attention.h"

namespace vt {

// Mirrored by ctypes in cpp.py. Strides are in cells.
struct MoveArgs {
  void* const* layers;  // base of each layer's [num_blocks, H, N, 2D] tensor
  const int64_t *src, *dst;
  void* workspace;  // num_threads * count * 2D cells
  GompParallel parallel;
  int64_t count, block_stride, head_stride;
  int32_t num_layers, num_kv_heads, head_size, block_size, k_group, cell_bytes, num_threads;
};

template <class T>
struct Mover {
  const MoveArgs& a;
  std::atomic<int64_t> next_item{0};
  std::atomic<int32_t> next_thread{0};

  explicit Mover(const MoveArgs& args) : a(args) {}

  int64_t k_cell(int64_t slot) const {
    const int64_t b = slot / a.block_size, off = slot % a.block_size;
    return b * a.block_stride + off / a.k_group * a.k_group * a.head_size + off % a.k_group;
  }
  int64_t v_cell(int64_t slot) const {
    return slot / a.block_size * a.block_stride +
           (a.block_size + slot % a.block_size) * a.head_size;
  }

  // All sources of a (layer, head) are read before the first destination is written: a slot may be
  // the source of one move and the destination of another.
  void one(T* kv, T* buffer) const {
    const int64_t D = a.head_size, step = a.k_group;
    for (int64_t i = 0; i < a.count; i++) {
      const int64_t next = a.src[i + 1 < a.count ? i + 1 : i];
      const T *k = kv + k_cell(a.src[i]), *v = kv + v_cell(a.src[i]), *kn = kv + k_cell(next);
      T* b = buffer + i * 2 * D;
      for (int64_t d = 0; d < D; d++) {
        __builtin_prefetch(kn + d * step);  // one cell a cache line: latency is all there is
        b[d] = k[d * step];
      }
      memcpy(b + D, v, D * sizeof(T));
    }
    for (int64_t i = 0; i < a.count; i++) {
      const int64_t next = a.dst[i + 1 < a.count ? i + 1 : i];
      T *k = kv + k_cell(a.dst[i]), *v = kv + v_cell(a.dst[i]), *kn = kv + k_cell(next);
      const T* b = buffer + i * 2 * D;
      for (int64_t d = 0; d < D; d++) {
        __builtin_prefetch(kn + d * step, 1);
        k[d * step] = b[d];
      }
      memcpy(v, b + D, D * sizeof(T));
    }
  }

  void work() {
    T* buffer = (T*)a.workspace + int64_t(next_thread.fetch_add(1)) * a.count * 2 * a.head_size;
    const int64_t items = int64_t(a.num_layers) * a.num_kv_heads;
    for (;;) {
      const int64_t i = next_item.fetch_add(1, std::memory_order_relaxed);
      if (i >= items) return;
      one((T*)a.layers[i / a.num_kv_heads] + i % a.num_kv_heads * a.head_stride, buffer);
    }
  }

  void run() {
    if (a.num_threads > 1 && a.parallel)
      a.parallel([](void* self) { ((Mover*)self)->work(); }, this, unsigned(a.num_threads), 0);
    else
      work();
  }
};

// scores[slot] += sum over heads of the L2 norm of the slot's key, for `count` distinct slots.
template <class C>
static void key_norms(const typename C::T* kv, const int64_t* slots, int64_t count, float* scores,
                      int64_t block_stride, int64_t head_stride, int H, int D, int N, int k_group) {
  for (int64_t i = 0; i < count; i++) {
    const int64_t b = slots[i] / N, off = slots[i] % N;
    const typename C::T* k = kv + b * block_stride + off / k_group * k_group * D + off % k_group;
    float total = 0;
    for (int h = 0; h < H; h++, k += head_stride) {
      float square[4] = {0, 0, 0, 0};  // four sums: D is a multiple of 16
      for (int d = 0; d < D; d++) {
        const float x = C::get(k[int64_t(d) * k_group]);
        square[d % 4] += x * x;
      }
      total += std::sqrt(square[0] + square[1] + (square[2] + square[3]));
    }
    scores[slots[i]] += total;
  }
}

}  // namespace vt
