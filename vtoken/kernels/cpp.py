"""The compiled kernels behind ctypes: argument structures, plans, threads."""

from __future__ import annotations

import ctypes
import re
from ctypes import Structure, byref, c_float, c_int32, c_int64, c_void_p
from pathlib import Path

import numpy as np
import torch

from vtoken.kernels.base import CPUKernels, CPUPlan
from vtoken.kernels.build import check_shared, fields_of, load_library
from vtoken.kernels.layout import DTYPES, GROUP_TOKENS, KVLayout, check_supported

DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}


class PlanArgs(Structure):
    _fields_ = [
        ("block_table", c_void_p), ("seq_lens", c_void_p), ("query_start_loc", c_void_p),
        ("mask", c_void_p), ("table_stride", c_int64), ("mask_stride", c_int64),
        ("num_requests", c_int32), ("table_width", c_int32), ("block_size", c_int32),
        ("score_queries", c_int32),
        ("error", c_int32), ("max_block", c_int32), ("num_queries", c_int32), ("live", c_void_p),
    ]  # fmt: skip


class Args(Structure):
    _fields_ = [
        ("plan", c_void_p), ("query", c_void_p), ("kv", c_void_p), ("out", c_void_p),
        ("step_scores", c_void_p), ("parallel", c_void_p),
        ("query_stride", c_int64), ("out_stride", c_int64),
        ("block_stride", c_int64), ("head_stride", c_int64),
        ("dtype", c_int32), ("num_heads", c_int32), ("num_kv_heads", c_int32),
        ("head_size", c_int32), ("k_group", c_int32), ("num_threads", c_int32),
        ("scale", c_float), ("softcap", c_float),
    ]  # fmt: skip


class CacheArgs(Structure):
    _fields_ = [
        ("layers", c_void_p), ("src", c_void_p), ("dst", c_void_p), ("scores", c_void_p),
        ("parallel", c_void_p),
        ("count", c_int64), ("block_stride", c_int64), ("head_stride", c_int64),
        ("num_layers", c_int32), ("num_kv_heads", c_int32), ("head_size", c_int32),
        ("block_size", c_int32), ("k_group", c_int32), ("dtype", c_int32),
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


def pack_mask(live: torch.Tensor) -> torch.Tensor:
    """Pack bool[R, P] (live by physical index) into int64[R, ceil(P / 64)], bit i = index i."""
    rows, width = live.shape
    padded = np.zeros((rows, -(-width // 64) * 64), bool)
    padded[:, :width] = live.numpy()
    return torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int64))


class CppPlan(CPUPlan):
    """A plan held by the library, freed with this object."""

    def __init__(
        self, library, block_table, seq_lens, query_start_loc, mask, score_queries, block_size
    ) -> None:
        self._library, self._handle = library, None
        self.num_live_tokens = torch.zeros(seq_lens.numel(), dtype=torch.int32)
        bits = None if mask is None else pack_mask(mask)
        args = PlanArgs(
            block_table.data_ptr(), seq_lens.data_ptr(), query_start_loc.data_ptr(),
            None if bits is None else bits.data_ptr(), block_table.stride(0),
            0 if bits is None else bits.stride(0), seq_lens.numel(), block_table.shape[1],
            block_size, score_queries,
            live=self.num_live_tokens.data_ptr(),
        )  # fmt: skip
        self._handle = library.vtk_plan_create(byref(args))
        code, request = args.error & 255, args.error >> 8
        assert self._handle, f"request {request}: {PLAN_ERRORS.get(code, code)}"
        self.block_size = block_size
        self.max_block, self.num_queries = args.max_block, args.num_queries

    def __del__(self) -> None:
        if self._handle:
            self._library.vtk_plan_free(self._handle)
            self._handle = None


class CppKernels(CPUKernels):
    """Compiled kernels of one variant ("avx2" or "avx512")."""

    name = "cpp"

    def __init__(self, variant: str) -> None:
        """Compile (at first use) and load.

        Raises:
            BuildError: no compiler, or what it built does not work.
        """
        self.why = f"C++ {variant}"
        self._library = library = load_library(variant)
        shared = fields_of(PlanArgs, Args, CacheArgs)
        check_shared(library, {"group": [str(GROUP_TOKENS)], **shared})
        library.vtk_plan_create.restype = c_void_p
        library.vtk_plan_free.argtypes = [c_void_p]
        self._parallel = _shared_pool()

    def _plan(self, *arrays_and_block_size) -> CppPlan:
        return CppPlan(self._library, *arrays_and_block_size)

    def _attention(
        self, plan, query, kv, out, layout, scale, softcap, step_scores, num_threads
    ) -> None:
        check_supported(layout, kv.dtype)
        threads = num_threads or torch.get_num_threads()
        args = Args(
            plan._handle, query.data_ptr(), kv.data_ptr(),
            None if out is None else out.data_ptr(),
            None if step_scores is None else step_scores.data_ptr(),
            self._parallel if threads > 1 else None,
            query.stride(0), 0 if out is None else out.stride(0), kv.stride(0), kv.stride(1),
            DTYPE_CODES[kv.dtype], query.shape[1], kv.shape[1], layout.head_size,
            layout.k_group, threads, scale, softcap,
        )  # fmt: skip
        _run(self._library.vtk_attention, args)

    def _move(self, kvs, src, dst, layout, num_threads) -> None:
        copied = len(kvs) * kvs[0].shape[1] * src.numel() * 2 * layout.head_size * kvs[0].itemsize
        threads = (num_threads or torch.get_num_threads()) if copied > SMALL_MOVE_BYTES else 1
        args = self._cache_args(kvs, src, layout)
        args.dst, args.num_threads = dst.data_ptr(), threads
        _run(self._library.vtk_move, args)

    def _key_norms(self, kv, slots, scores, layout) -> None:
        args = self._cache_args([kv], slots, layout)
        args.scores = scores.data_ptr()
        _run(self._library.vtk_key_norms, args)

    def _cache_args(self, kvs, slots: torch.Tensor, layout: KVLayout) -> CacheArgs:
        kv = kvs[0]
        check_supported(layout, kv.dtype)
        bases = (c_void_p * len(kvs))(*[layer.data_ptr() for layer in kvs])
        args = CacheArgs(
            ctypes.addressof(bases), slots.data_ptr(), None, None, self._parallel,
            slots.numel(), kv.stride(0), kv.stride(1), len(kvs), kv.shape[1], layout.head_size,
            layout.block_size, layout.k_group, DTYPE_CODES[kv.dtype],
        )  # fmt: skip
        args.bases = bases  # kept as long as its address is
        return args


def _run(function, args: Structure) -> None:
    status = function(byref(args))
    assert status == 0, status


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
