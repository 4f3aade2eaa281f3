// The C interface of vToken's CPU kernels, called through ctypes by cpp.py.
//
// Compiled once per instruction set: -mavx2 -mfma -mf16c, or -DVT_AVX512 with the AVX-512 flags.
// No OpenMP pragma and no link to a runtime: the caller passes `GOMP_parallel` of the runtime that
// torch already uses, so that both share one pool of threads. Never -ffast-math: linking with it
// sets flush-to-zero for the whole process.
#include "batch.h"
#include "move.h"

using namespace vt;

namespace {

enum Status { kOk = 0, kBadDtype = -1, kWorkspaceTooSmall = -2 };

// One thread where a second would wait longer for its start than it could help.
int threads_for(const Args& a) {
  const int64_t work = a.plan->pairs * a.num_heads * a.head_size;
  return !a.parallel || work < kSmallWork ? 1 : a.num_threads;
}

Shape shape_of(const Args& a) {
  const int cell = a.dtype == 0 ? 4 : 2, threads = threads_for(a);
  int step = kStepBytes / (kGroup * 2 * a.head_size * cell);
  step = step < 1 ? 1 : step > 4 ? 4 : step;
  // A tile is divided by heads where tiles alone would leave threads idle.
  int64_t tiles = a.plan->tiles.size();
  int split = 1;
  while (split < a.num_kv_heads && threads > 1 && tiles * split < 4 * threads) split++;
  return {a.num_heads, a.num_kv_heads, a.num_heads / a.num_kv_heads, a.head_size, step, split,
          a.step_scores != nullptr};
}

template <class C>
int attention(const Args& a) {
  const Shape s = shape_of(a);
  const int threads = threads_for(a);
  Space space(*a.plan, s, threads, (char*)a.workspace);
  if (int64_t(space.total) > a.workspace_bytes) return kWorkspaceTooSmall;
  Batch<C>(a, s, space).run(threads);
  return kOk;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int vtk_variant() { return kVariant; }

int vtk_args_bytes() { return int(sizeof(Args)); }

// Null on error; `*error` is then PlanError | request << 8.
Plan* vtk_plan_create(const PlanInput* in, int* error) {
  Plan* p = new Plan;
  *error = make_plan(*p, *in);
  if (!*error) return p;
  delete p;
  return nullptr;
}

void vtk_plan_free(Plan* p) { delete p; }

// info: largest block id, query rows read, live tokens, whether slots are shared.
void vtk_plan_info(const Plan* p, int64_t* info) {
  info[0] = p->max_block;
  info[1] = p->num_queries;
  info[2] = p->live_tokens;
  info[3] = p->shared_slots;
}

// Live tokens of each request.
void vtk_plan_live(const Plan* p, int32_t* live) {
  for (const Request& r : p->requests) *live++ = r.nlive;
}

int64_t vtk_workspace_bytes(const Args* a) {
  return int64_t(Space(*a->plan, shape_of(*a), threads_for(*a), nullptr).total);
}

int vtk_attention(const Args* a) {
  switch (a->dtype) {
    case 0: return attention<F32>(*a);
    case 1: return attention<BF16>(*a);
    case 2: return attention<F16>(*a);
    default: return kBadDtype;
  }
}

int vtk_move(const MoveArgs* a) {
  if (a->cell_bytes == 4)
    Mover<uint32_t>(*a).run();
  else if (a->cell_bytes == 2)
    Mover<uint16_t>(*a).run();
  else
    return kBadDtype;
  return kOk;
}

int vtk_key_norms(int dtype, const void* kv, const int64_t* slots, int64_t count, float* scores,
                  int64_t block_stride, int64_t head_stride, int H, int D, int N, int k_group) {
  switch (dtype) {
    case 0:
      key_norms<F32>((const float*)kv, slots, count, scores, block_stride, head_stride, H, D, N,
                     k_group);
      return kOk;
    case 1:
      key_norms<BF16>((const uint16_t*)kv, slots, count, scores, block_stride, head_stride, H, D,
                      N, k_group);
      return kOk;
    case 2:
      key_norms<F16>((const uint16_t*)kv, slots, count, scores, block_stride, head_stride, H, D,
                     N, k_group);
      return kOk;
    default: return kBadDtype;
  }
}

}  // extern "C"
#pragma GCC visibility pop
