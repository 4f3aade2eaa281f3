"""The contract of an engine that is driven step by step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from vtoken.core.counters import Counters
from vtoken.core.invariants import check_block_table, check_pool, check_table
from vtoken.recording.trace import TraceEntry


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """Attributes:
    prompt_token_ids, output_token_ids: vocabulary ids.
    logprobs: of each output token, natural log; empty unless asked for.
    finish_reason: "length", "stop", "abort" or "error".
    """

    req_id: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    logprobs: list[float]
    finish_reason: str


class StepEngine(ABC):
    """vLLM's scheduler and block pool, stepped by the caller.

    Attributes:
        scheduler: vLLM's scheduler object, with vToken's hooks unless the mode is native.
        block_size: tokens per block.
        num_usable_blocks: blocks in the pool, the null block left out.
    """

    scheduler = None
    block_size: int
    num_usable_blocks: int

    @abstractmethod
    def add(
        self,
        req_id: str,
        prompt_token_ids: Sequence[int],
        max_tokens: int,
        *,
        logprobs: bool = False,
        ignore_eos: bool = True,
        arrival_s: float | None = None,
    ) -> None:
        """Submit a request, greedy.

        Raises:
            ConfigError: it can never fit the pool, or is longer than the model takes.
        """

    @abstractmethod
    def step(self) -> tuple[dict[str, int], list[FinishedRequest]]:
        """Run one step.

        Returns:
            New output tokens per request, and the requests that finished.
        """

    @abstractmethod
    def abort(self, req_ids: Sequence[str]) -> None:
        """End requests early; their blocks are free before the next step."""

    @abstractmethod
    def close(self) -> None:
        """Give memory back; the engine is of no use afterwards."""

    def has_unfinished(self) -> bool:
        return self.scheduler.has_requests()

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes; no request may be running."""
        self.scheduler.reset_prefix_cache()

    @property
    def hooks(self):
        """vToken's `vtoken.scheduling.step.Step`, or None where the mode is native."""
        return getattr(self.scheduler, "vtoken", None)

    @property
    def counters(self) -> Counters:
        return self.hooks.counters if self.hooks is not None else Counters()

    @property
    def trace(self) -> list[TraceEntry]:
        trace = self.hooks.trace if self.hooks is not None else None
        return [] if trace is None else trace.entries

    @property
    def block_pool(self):
        return self.scheduler.kv_cache_manager.block_pool

    def num_used_blocks(self) -> int:
        """Distinct blocks that requests hold."""
        return self.num_usable_blocks - self.block_pool.get_num_free_blocks()

    def check_invariants(self) -> list[str]:
        """Check every table against the pool; sentences, empty when all is well."""
        manager = self.scheduler.kv_cache_manager.coordinator.single_type_managers[0]
        rows = [[b.block_id for b in row] for row in manager.req_to_blocks.values()]
        wrong = check_pool(
            self.block_pool.num_gpu_blocks, self.block_pool.get_num_free_blocks(), rows
        )
        if self.hooks is None:
            return wrong
        for req_id, state in self.hooks.requests.by_id.items():
            blocks = manager.req_to_blocks[req_id]
            state.sync(self.scheduler.requests[req_id].num_computed_tokens)
            wrong += check_table(state.table)
            wrong += check_block_table(state.table, [b.block_id for b in blocks])
        return wrong

    def check_idle(self) -> list[str]:
        """After the last request: every block is back, no table is left."""
        wrong = self.check_invariants()
        free = self.block_pool.get_num_free_blocks()
        if free != self.num_usable_blocks:
            wrong.append(f"{self.num_usable_blocks - free} blocks are still held by nobody")
        if self.hooks is not None and (
            self.hooks.requests.by_id or len(self.hooks.requests.tables)
        ):
            wrong.append(f"tables are left of {sorted(self.hooks.requests.by_id)}")
        if self.hooks is not None and self.hooks.admission.num_claimed:
            wrong.append(f"{self.hooks.admission.num_claimed} blocks are still reserved for nobody")
        return wrong

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc) -> None:
        self.close()
