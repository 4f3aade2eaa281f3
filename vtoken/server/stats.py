"""Figures of a step on their way from a scheduler to the front ends that serve /metrics.

vLLM sends its own `SchedulerStats` after every step, to one of the front ends; of its fields only
`num_kv_fetch_reqs_by_stage` is a dict[str, int] in every configuration, so ours ride in it under
keys of their own and are taken out again before vLLM's loggers look (`split`).

Counts travel as the growth since the last message, never as totals: with several front ends each
sees some of the messages, and only growth adds up over them.
"""

from __future__ import annotations

import logging
import time

from vtoken.core.invariants import check_block_table, check_pool, check_table

logger = logging.getLogger("vllm.vtoken")

KEY_PREFIX = "vtoken:"

COUNTS = (
    "evicted_tokens",
    "moved_tokens",
    "released_blocks",
    "reused_slots",
    "preemptions",
    "relocation_events",
)
GAUGES = ("live_tokens", "dead_tokens", "headroom_blocks", "running_requests")
DURATIONS_NS = ("plan_ns", "relocation_ns")
VIOLATIONS = "invariant_violations"

GAUGE_INTERVAL_S = 0.25
CHECK_EVERY_STEPS = 512


def split(by_stage: dict[str, int]) -> dict[str, int]:
    """Take our figures out of vLLM's dict; both sides keep what is theirs."""
    ours = [k for k in by_stage if k.startswith(KEY_PREFIX)]
    return {k.removeprefix(KEY_PREFIX): by_stage.pop(k) for k in ours}


def live_and_dead_tokens(hooks, running) -> tuple[int, int]:
    """Live tokens, and slots of dead ones in blocks that requests still own."""
    live = dead = 0
    for request in running:
        state = hooks.requests.by_id.get(request.request_id)
        if state is None:
            continue
        live += request.num_computed_tokens - state.table.num_evicted_tokens
        dead += len(state.table.holes)
    return live, dead


class StatsSource:
    """Collects a scheduler's figures, once per step.

    Attributes:
        relocation_ns: nanoseconds that workers spent on copies since the last message.
        num_violations: invariants found broken by the sampled check.
    """

    def __init__(self, step) -> None:
        self.step = step
        self.relocation_ns = 0
        self.num_violations = 0
        self._sent = dict.fromkeys((*COUNTS, VIOLATIONS), 0)
        self._sent_plan_s = 0.0
        self._next_gauges_s = 0.0
        self._next_check_step = CHECK_EVERY_STEPS

    def take(self) -> dict[str, int]:
        """What changed since the last call, keyed as it travels."""
        hooks = self.step
        if hooks.clock.seq >= self._next_check_step:
            self._next_check_step = hooks.clock.seq + CHECK_EVERY_STEPS
            self._check()
        out = {}
        for name in COUNTS:
            self._grow(out, name, getattr(hooks.counters, name))
        self._grow(out, VIOLATIONS, self.num_violations)
        plan_s = hooks.counters.plan_s + hooks.counters.finalize_s
        if plan_s != self._sent_plan_s:
            out[KEY_PREFIX + "plan_ns"] = max(1, int((plan_s - self._sent_plan_s) * 1e9))
            self._sent_plan_s = plan_s
        if self.relocation_ns:
            out[KEY_PREFIX + "relocation_ns"] = self.relocation_ns
            self.relocation_ns = 0
        running = hooks.scheduler.running
        now = time.monotonic()
        # An engine that falls idle sends nothing more: its last message must be exact.
        if now >= self._next_gauges_s or not running:
            self._next_gauges_s = now + GAUGE_INTERVAL_S
            live, dead = live_and_dead_tokens(hooks, running)
            values = (live, dead, hooks.pool.get_num_free_blocks(), len(running))
            out.update({KEY_PREFIX + n: v for n, v in zip(GAUGES, values, strict=True)})
        return out

    def _grow(self, out: dict[str, int], name: str, total: int) -> None:
        grown = total - self._sent[name]
        if grown > 0:
            out[KEY_PREFIX + name] = grown
        self._sent[name] = total

    def _check(self) -> None:
        """Check one running request and the pool; in turn, so that all are reached."""
        hooks, running = self.step, self.step.scheduler.running
        manager = hooks.manager
        rows = [[b.block_id for b in row] for row in manager.req_to_blocks.values()]
        wrong = check_pool(hooks.pool.num_gpu_blocks, hooks.pool.get_num_free_blocks(), rows)
        if running:
            request = running[(hooks.clock.seq // CHECK_EVERY_STEPS) % len(running)]
            state = hooks.requests.by_id.get(request.request_id)
            if state is not None:
                blocks = manager.req_to_blocks[request.request_id]
                state.sync(request.num_computed_tokens)
                wrong += check_table(state.table)
                wrong += check_block_table(state.table, [b.block_id for b in blocks])
        for sentence in wrong:
            logger.error("vToken found a broken invariant: %s", sentence)
        self.num_violations += len(wrong)
