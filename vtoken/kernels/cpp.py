"""The compiled kernels behind ctypes: argument structures, workspaces, threads."""

from __future__ import annotations

import ctypes
import re
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_void_p, sizeof
from pathlib import Path

import torch

from vtoken.kernels import build
from vtoken.kernels.base import Kernels, Plan, PlanInput
from vtoken.kernels.layout import DTYPES, check_supported

DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}


class _PlanInput(Structure):
    _fields_ = [
        ("block_table", c_void_p), ("seq_lens", c_void_p), ("query_start_loc", c_void_p),
        ("score_queries", c_void_p), ("mask", c_void_p),
        ("table_stride", c_int64), ("mask_stride", c_int64),
        ("num_requests", c_int32), ("table_width", c_int32), ("block_size", c_int32),
    ]  # fmt: skip


class _Args(Structure):
    _fields_ = [
        ("plan", c_void_p), ("query", c_void_p), ("kv", c_void_p), ("out", c_void_p),
        ("step_scores", c_void_p), ("workspace", c_void_p), ("parallel", c_void_p),
        ("workspace_bytes", c_int64), ("query_stride", c_int64), ("out_stride", c_int64),
        ("block_stride", c_int64), ("head_stride", c_int64),
        ("dtype", c_int32), ("num_heads", c_int32), ("num_kv_heads", c_int32),
        ("head_size", c_int32), ("k_group", c_int32), ("num_threads", c_int32),
        ("scale", c_float), ("softcap", c_float),
    ]  # fmt: skip


class _MoveArgs(Structure):
    _fields_ = [
        ("layers", c_void_p), ("src", c_void_p), ("dst", c_void_p), ("workspace", c_void_p),
        ("parallel", c_void_p),
        ("count", c_int64), ("block_stride", c_int64), ("head_stride", c_int64),
        ("num_layers", c_int32), ("num_kv_heads", c_int32), ("head_size", c_int32),
        ("block_size", c_int32), ("k_group", c_int32), ("cell_bytes", c_int32),
        ("num_threads", c_int32),
    ]  # fmt: skip


PLAN_ERRORS = {
    1: "more queries than keys",
    2: "a token of the chunk is dead",
    3: "its blocks do not cover its length, or an id is negative",
    4: "query_start_loc is not ascending",
}
# Copies of fewer bytes than this are made by one thread.
SMALL_MOVE_BYTES = 1 << 18


class CppPlan(Plan):
    """A plan held by the library, freed with this object."""

    def __init__(self, library: ctypes.CDLL, given: PlanInput) -> None:
        self._library, self._handle = library, None
        mask = given.live_mask
        raw = _PlanInput(
            given.block_table.data_ptr(), given.seq_lens.data_ptr(),
            given.query_start_loc.data_ptr(), given.score_queries.data_ptr(),
            None if mask is None else mask.data_ptr(),
            given.block_table.stride(0), 0 if mask is None else mask.stride(0),
            given.num_requests, given.block_table.shape[1], given.block_size,
        )  # fmt: skip
        error = c_int32(0)
        self._handle = library.vtk_plan_create(byref(raw), byref(error))
        code, request = error.value & 255, error.value >> 8
        assert self._handle, f"request {request}: {PLAN_ERRORS.get(code, code)}"
        info = (c_int64 * 4)()
        library.vtk_plan_info(self._handle, info)
        self.block_size = given.block_size
        self.max_block, self.num_queries = int(info[0]), int(info[1])
        self.shared_slots = bool(info[3])
        self._num_requests = given.num_requests
        self.workspace_bytes: dict[tuple, int] = {}

    @property
    def num_live_tokens(self) -> torch.Tensor:
        counts = torch.zeros(self._num_requests, dtype=torch.int32)
        self._library.vtk_plan_live(self._handle, counts.data_ptr())
        return counts

    def __del__(self) -> None:
        if self._handle:
            self._library.vtk_plan_free(self._handle)
            self._handle = None


class CppKernels(Kernels):
    """Compiled kernels of one variant ("avx2" or "avx512")."""

    name = "cpp"

    def __init__(self, variant: str) -> None:
        """Compile (at first use) and load.

        Raises:
            build.BuildError: no compiler, or what it built does not work.
        """
        self.variant = variant
        self.why = f"C++ {variant}"
        self._library = _declare(build.load_library(variant))
        self._parallel = _shared_pool()
        # Workspaces not in use; a call takes one and gives it back, so calls may overlap.
        self._workspaces: list[torch.Tensor] = []

    def _plan(self, given: PlanInput) -> Plan:
        return CppPlan(self._library, given)

    def _attention(
        self, plan, query, kv, out, layout, scale, softcap, step_scores, num_threads
    ) -> None:
        threads = num_threads or torch.get_num_threads()
        args = _Args(
            plan._handle, query.data_ptr(), kv.data_ptr(),
            None if out is None else out.data_ptr(),
            None if step_scores is None else step_scores.data_ptr(),
            None, self._parallel if threads > 1 else None,
            0, query.stride(0), 0 if out is None else out.stride(0), kv.stride(0), kv.stride(1),
            DTYPE_CODES.get(kv.dtype, -1), query.shape[1], kv.shape[1], layout.head_size,
            layout.k_group, threads, scale, softcap,
        )  # fmt: skip
        shape = (query.shape[1], kv.shape[1], layout, kv.dtype, step_scores is None, threads)
        needed = plan.workspace_bytes.get(shape)
        if needed is None:
            check_supported(layout, kv.dtype)
            needed = self._library.vtk_workspace_bytes(byref(args))
            plan.workspace_bytes[shape] = needed
        space = self._take(needed)
        args.workspace, args.workspace_bytes = _aligned(space), needed
        status = self._library.vtk_attention(byref(args))
        self._workspaces.append(space)
        assert status == 0, status

    def _move(self, kvs, src, dst, layout, num_threads) -> None:
        kv = kvs[0]
        check_supported(layout, kv.dtype)
        row = 2 * layout.head_size * kv.element_size()
        copied = len(kvs) * kv.shape[1] * src.numel() * row
        threads = (num_threads or torch.get_num_threads()) if copied > SMALL_MOVE_BYTES else 1
        bases = (c_void_p * len(kvs))(*[layer.data_ptr() for layer in kvs])
        space = self._take(threads * src.numel() * row)
        args = _MoveArgs(
            ctypes.cast(bases, c_void_p), src.data_ptr(), dst.data_ptr(), _aligned(space),
            self._parallel, src.numel(), kv.stride(0), kv.stride(1), len(kvs), kv.shape[1],
            layout.head_size, layout.block_size, layout.k_group, kv.element_size(), threads,
        )  # fmt: skip
        status = self._library.vtk_move(byref(args))
        self._workspaces.append(space)
        assert status == 0, status

    def _key_norms(self, kv, slots, scores, layout) -> None:
        check_supported(layout, kv.dtype)
        status = self._library.vtk_key_norms(
            DTYPE_CODES[kv.dtype], kv.data_ptr(), slots.data_ptr(), slots.numel(),
            scores.data_ptr(), kv.stride(0), kv.stride(1), kv.shape[1], layout.head_size,
            layout.block_size, layout.k_group,
        )  # fmt: skip
        assert status == 0, status

    def _take(self, num_bytes: int) -> torch.Tensor:
        try:
            space = self._workspaces.pop()
        except IndexError:
            space = torch.empty(0, dtype=torch.uint8)
        if space.numel() < num_bytes + 64:
            # A quarter more: lengths grow by a token a step, allocations should not.
            space = torch.empty(num_bytes * 5 // 4 + 64, dtype=torch.uint8)
        return space


def _aligned(space: torch.Tensor) -> int:
    return -(-space.data_ptr() // 64) * 64


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    library.vtk_plan_create.restype = c_void_p
    library.vtk_plan_create.argtypes = [POINTER(_PlanInput), POINTER(c_int32)]
    library.vtk_plan_free.argtypes = [c_void_p]
    library.vtk_plan_free.restype = None
    library.vtk_plan_info.argtypes = [c_void_p, POINTER(c_int64)]
    library.vtk_plan_info.restype = None
    library.vtk_plan_live.argtypes = [c_void_p, c_void_p]
    library.vtk_plan_live.restype = None
    library.vtk_workspace_bytes.argtypes = [POINTER(_Args)]
    library.vtk_workspace_bytes.restype = c_int64
    library.vtk_attention.argtypes = [POINTER(_Args)]
    library.vtk_move.argtypes = [POINTER(_MoveArgs)]
    library.vtk_key_norms.argtypes = [
        c_int32, c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int64,
        c_int32, c_int32, c_int32, c_int32,
    ]  # fmt: skip
    assert library.vtk_args_bytes() == sizeof(_Args), "cpp.py and attention.h disagree"
    return library


def _shared_pool() -> int | None:
    """Address of `GOMP_parallel` in the OpenMP runtime torch runs on; None: one thread only.

    A second runtime would bring a second pool, whose idle threads spin on the first one's cores.
    """
    libraries: list[str | None] = [None]  # global scope first: a preloaded runtime wins there
    try:
        maps = Path("/proc/self/maps").read_text()
        libraries += re.findall(
            r"(\S*/lib(?:gomp|iomp5|omp)[^/\s]*\.so[^/\s]*)$", maps, re.MULTILINE
        )
    except OSError:
        pass
    for name in dict.fromkeys(libraries):
        try:
            return ctypes.cast(ctypes.CDLL(name).GOMP_parallel, c_void_p).value
        except (OSError, AttributeError):
            continue
    return None
