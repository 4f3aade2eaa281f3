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

enum Status { kOk = 0, kBadDtype = -1 };

// f(cell type), by the code that cpp.py gives a dtype: its place in layout.DTYPES.
template <class F>
int with_cells(int dtype, F f) {
  switch (dtype) {
    case 0: return f(F32());
    case 1: return f(BF16());
    case 2: return f(F16());
    default: return kBadDtype;
  }
}

// One thread where a second would wait longer for its start than it could help.
int threads_for(const Args& a) {
  const int64_t work = a.plan->pairs * a.num_heads * a.head_size;
  return !a.parallel || work < kSmallWork ? 1 : a.num_threads;
}

Shape shape_of(const Args& a) {
  const int cell = a.dtype == 0 ? 4 : 2, threads = threads_for(a);
  const int step = std::clamp(kStepBytes / (kGroup * 2 * a.head_size * cell), 1, 4);
  // A tile is divided by heads where tiles alone would leave threads idle.
  const int64_t tiles = a.plan->tiles.size();
  int split = 1;
  while (split < a.num_kv_heads && threads > 1 && tiles * split < 4 * threads) split++;
  return {a.num_heads, a.num_kv_heads, a.num_heads / a.num_kv_heads, a.head_size, step, split,
          a.step_scores != nullptr};
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

const char* vt_describe() {
  static const std::string text =
      "variant " VT_VARIANT "\ngroup " + std::to_string(kGroup) + "\n" +
      VT_TELL_STRUCT(PlanArgs, VT_PLAN_ARGS) + VT_TELL_STRUCT(Args, VT_ARGS) +
      VT_TELL_STRUCT(CacheArgs, VT_CACHE_ARGS);
  return text.c_str();
}

// Null on error; `a->error` is then PlanError | request << 8.
Plan* vtk_plan_create(PlanArgs* a) {
  Plan* p = new Plan;
  if (make_plan(*p, *a)) return p;
  delete p;
  return nullptr;
}

void vtk_plan_free(Plan* p) { delete p; }

int vtk_attention(const Args* a) {
  return with_cells(a->dtype, [&](auto cell) {
    const Shape s = shape_of(*a);
    const int threads = threads_for(*a);
    Workspace& memory = Workspace::of_thread();
    Space space(*a->plan, s, threads, memory);
    if (space.total > memory.size) {
      memory.hold(space.total);
      space = Space(*a->plan, s, threads, memory);
    }
    Batch<decltype(cell)>(*a, s, space).run(threads);
    return kOk;
  });
}

int vtk_move(const CacheArgs* a) {
  return with_cells(a->dtype, [&](auto cell) {
    Mover<typename decltype(cell)::T>{*a}.run();
    return kOk;
  });
}

int vtk_key_norms(const CacheArgs* a) {
  return with_cells(a->dtype, [&](auto cell) {
    key_norms<decltype(cell)>(*a);
    return kOk;
  });
}

}  // extern "C"
#pragma GCC visibility pop
