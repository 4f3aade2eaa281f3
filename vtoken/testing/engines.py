"""Dry engines that check themselves after every step, and random work to drive them with.

    engine = CheckedDryEngine(DrySettings(...), config, victims=my_reference)
    drive(engine, seed=3, num_actions=60)

vLLM's real scheduler runs with vToken's hooks; `WorkerModel` applies every StepPlan to KV that
carries its origin; `Oracle` says what should be there. A fault can be put in between: a plan that
is damaged on its way to the worker must be noticed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from vtoken.config import VTokenConfig
from vtoken.core.events import StepPlan
from vtoken.core.invariants import check_step_plan
from vtoken.engine.dry import DryEngine, DrySettings
from vtoken.errors import ConfigError, InvariantViolation
from vtoken.testing.oracle import HashBook, Oracle, Victims, made_up_score
from vtoken.testing.worker_model import WorkerModel

PlanFault = Callable[[StepPlan, np.random.Generator], bool]
"""Damages a copy of a plan; tells whether there was anything to damage."""


class CheckedDryEngine(DryEngine):
    """A dry engine whose worker is a `WorkerModel`; every step is held against an `Oracle`.

    Args:
        victims: see `Oracle`.
        fault: applied to the copy of each plan that the worker gets.

    Attributes:
        num_faults: plans that the fault changed.
        num_hits: blocks that prefix hits brought in.

    `step` raises InvariantViolation, with the name of the broken invariant.
    """

    def __init__(
        self, settings: DrySettings, config: VTokenConfig | None = None, *,
        victims: Victims | None = None, fault: PlanFault | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        if config is not None:
            config = config.model_copy(update={"trace": True})
        super().__init__(
            settings, config, score_source=self._made_up_scores, worker=self._run_worker
        )
        self.model = WorkerModel(settings.num_kv_blocks + 1, settings.block_size)
        self.oracle = Oracle(config, settings.block_size, victims)
        self.hashes = HashBook(settings.block_size)
        self.fault, self._rng = fault, np.random.default_rng(seed)
        self.num_faults = self.num_hits = self.num_steps = 0
        self._protected: dict[str, set[int]] = {}
        self._wrong: list[tuple[str, str]] = []  # found by the worker, raised after the step

    @property
    def _manager(self):
        return self.scheduler.kv_cache_manager.coordinator.single_type_managers[0]

    def rows(self) -> dict[str, list[int]]:
        """Block ids of every request that holds some."""
        rows = self._manager.req_to_blocks.items()
        return {req_id: [b.block_id for b in blocks] for req_id, blocks in rows}

    # ---- a step ----------------------------------------------------------------------------

    def step(self):
        self._wrong.clear()
        self._note_protected()
        new_tokens, finished = super().step()
        self.num_steps += 1
        for f in finished:
            wrong = self.oracle.check_output(
                f.req_id, len(f.prompt_token_ids), list(f.output_token_ids)
            )
            self._wrong += [("output", w) for w in wrong]
        self._check()
        if self._wrong:
            name, _ = self._wrong[0]
            raise InvariantViolation(name, "; ".join(w for _, w in self._wrong))
        return new_tokens, finished

    def _note_protected(self) -> None:
        """Ids that sit in blocks of several requests, by what the worker's slots say."""
        rows, N = self.rows(), self.block_size
        owners: dict[int, int] = {}
        for row in rows.values():
            for b in set(row) - {0}:
                owners[b] = owners.get(b, 0) + 1
        self._protected = {
            req_id: {
                label[1]
                for b in row
                if owners.get(b, 0) > 1
                for label in self.model.labels[b * N : (b + 1) * N]
                if label is not None
            }
            for req_id, row in rows.items()
        }

    def _run_worker(self, scheduler_output) -> None:
        plan = getattr(scheduler_output, "vtoken", None)
        step_seq = self.hooks.step_seq if self.hooks is not None else self.num_steps
        if plan is not None:
            self._check_plan(plan)
        self.num_hits += sum(
            new.num_computed_tokens // self.block_size
            for new in scheduler_output.scheduled_new_reqs
        )
        self._learn_hashes()
        recorded = self._take_trace(step_seq)
        wrong = self.oracle.begin_step(step_seq, scheduler_output, self._protected, recorded)
        self._wrong += [("I1", w) for w in wrong]
        if plan is not None and self.fault is not None:
            damaged = copy.deepcopy(plan)
            if self.fault(damaged, self._rng):
                self.num_faults += 1
                plan = damaged
        self.model.execute(scheduler_output, plan)
        for req_id, read in self.model.reads.items():
            wrong = self.oracle.compute(req_id, step_seq, read)
            self._wrong += [("I3", w) for w in wrong]

    def _check_plan(self, plan: StepPlan) -> None:
        rows, N = self.rows(), self.block_size
        counts: dict[int, int] = {}
        for row in rows.values():
            for b in set(row):
                counts[b] = counts.get(b, 0) + 1
        shared = {b for b, n in counts.items() if n > 1}
        wrong = check_step_plan(plan, self.model.num_blocks * N, shared, N)
        for r, req_id in enumerate(plan.req_ids):
            _, destination = plan.moves_of(r)
            foreign = set((destination // N).tolist()) - set(rows.get(req_id, ()))
            if foreign:
                wrong.append(f"{req_id} moves into blocks {sorted(foreign)} that it does not own")
        self._wrong += [("I4", w) for w in wrong]

    def _take_trace(self, step_seq: int) -> dict[str, np.ndarray]:
        """Live ids that the engine recorded for this step, by request; the trace is emptied."""
        if self.hooks is None:
            return {}
        entries, self.hooks.trace[:] = list(self.hooks.trace), []
        assert all(e.step_seq == step_seq for e in entries)
        return {e.req_id: e.live_ids for e in entries}

    def _make_output(self, scheduler_output):
        out = super()._make_output(scheduler_output)
        for i, req_id in enumerate(out.req_ids):
            sampled = self.model.reads[req_id].sampled
            if (sampled is not None) != bool(out.sampled_token_ids[i]):
                self._wrong.append(
                    ("positions", f"{req_id}: scheduler and worker differ on sampling")
                )
            out.sampled_token_ids[i] = [] if sampled is None else [sampled]
        return out

    def _made_up_scores(self, req_id: str, step_seq: int, ids: np.ndarray) -> np.ndarray:
        request = self.oracle.requests[req_id]
        return np.array(
            [
                made_up_score(request.prompt_hash, i, request.num_computed) if i >= 0 else 0.0
                for i in ids.tolist()
            ],
            np.float32,
        )

    # ---- checks after the step -------------------------------------------------------------

    def _check(self) -> None:
        self._wrong += [("conservation", w) for w in self.check_invariants()]
        if self.hooks is not None:
            self._check_tables()
        if self.settings.enable_prefix_caching:
            self._check_cached_blocks()

    def _check_tables(self) -> None:
        for req_id, state in self.hooks.states.items():
            table = state.table
            ids = table.live_ids()
            if self.oracle.victims is None:
                # Unscheduled requests leave no trace: what the engine holds must be a subset.
                self.oracle.follow(req_id, ids)
            slots = table.slots_of(table.index_of[ids])
            wrong = self.oracle.check_slots(req_id, ids, slots, self.model.kv)
            self._wrong += [("I1", w) for w in wrong]

    def _learn_hashes(self) -> None:
        if self.settings.enable_prefix_caching:
            for request in self.scheduler.requests.values():
                self.hashes.learn(
                    request.request_id, list(request.all_token_ids), list(request.block_hashes)
                )

    def _check_cached_blocks(self) -> None:
        from vllm.v1.core.kv_cache_utils import get_block_hash

        self._learn_hashes()
        for block in self.block_pool.blocks:
            if block.block_hash is not None:
                wrong = self.hashes.check_block(
                    block.block_id, get_block_hash(block.block_hash), self.model.kv
                )
                self._wrong += [("I1", w) for w in wrong]


# ---- faults --------------------------------------------------------------------------------


def _skip_a_copy(plan: StepPlan, rng: np.random.Generator) -> bool:
    if not len(plan.move_source):
        return False
    m = int(rng.integers(len(plan.move_source)))
    plan.move_source[m] = plan.move_destination[m]
    return True


def _swap_destinations(plan: StepPlan, rng: np.random.Generator) -> bool:
    if len(plan.move_source) < 2:
        return False
    a, b = rng.choice(len(plan.move_source), 2, replace=False)
    d = plan.move_destination
    d[a], d[b] = d[b], d[a]
    return True


def _swap_source_and_destination(plan: StepPlan, rng: np.random.Generator) -> bool:
    if not len(plan.move_source):
        return False
    plan.move_source, plan.move_destination = plan.move_destination, plan.move_source
    return True


def _leave_a_row(plan: StepPlan, rng: np.random.Generator) -> bool:
    rows = np.flatnonzero(plan.rewrites_row)
    if not len(rows):
        return False
    plan.rewrites_row[rng.choice(rows)] = False
    return True


def _turn_a_row_round(plan: StepPlan, rng: np.random.Generator) -> bool:
    """Swap two blocks of a row; a fault only where the row has two."""
    for r in np.flatnonzero(plan.rewrites_row):
        row = plan.row_of(r)
        if len(row) >= 2:
            row[0], row[-1] = row[-1], row[0]
            return True
    return False


def _reuse_the_next_slot(plan: StepPlan, rng: np.random.Generator) -> bool:
    r = np.flatnonzero(plan.new_token_index >= 0)
    if not len(r):
        return False
    plan.new_token_index[r[0]] += 1
    return True


def _miscount_the_length(plan: StepPlan, rng: np.random.Generator) -> bool:
    r = np.flatnonzero(plan.num_reclaimed > 0)
    if not len(r):
        return False
    plan.num_reclaimed[r[0]] -= 1
    return True


def _flip_a_live_bit(plan: StepPlan, rng: np.random.Generator) -> bool:
    if not len(plan.mask_bits):
        return False
    plan.mask_bits[0] ^= 1 << int(rng.integers(4))
    return True


PLAN_FAULTS: dict[str, PlanFault] = {
    "a copy skipped": _skip_a_copy,
    "two destinations swapped": _swap_destinations,
    "source and destination swapped": _swap_source_and_destination,
    "a row left as it was": _leave_a_row,
    "a row in another order": _turn_a_row_round,
    "slot reuse off by one": _reuse_the_next_slot,
    "a length off by one": _miscount_the_length,
    "a live bit flipped": _flip_a_live_bit,
}
"""Damage to a StepPlan on its way to the worker, by what it amounts to."""


# ---- random work ---------------------------------------------------------------------------


@dataclass
class Workload:
    """Random requests with shared prefixes.

    Attributes:
        num_prefixes, prefix_tokens: prompts begin with one of so many prefixes, or with none.
        max_prompt_tokens, max_output_tokens: upper bounds.
    """

    num_prefixes: int = 2
    prefix_tokens: int = 24
    max_prompt_tokens: int = 60
    max_output_tokens: int = 60
    num_added: int = field(default=0, init=False)

    def prompt(self, rng: np.random.Generator) -> list[int]:
        which = int(rng.integers(-1, self.num_prefixes))
        cut = int(rng.integers(1, self.prefix_tokens + 1))
        head = [20 + (which * 7 + i) % 13 for i in range(cut)] if which >= 0 else []
        room = self.max_prompt_tokens - len(head)
        rest = rng.integers(40, 60, int(rng.integers(1, max(2, room))))
        return [*head, *rest.tolist()]

    def request(self, rng: np.random.Generator) -> tuple[str, list[int], int]:
        self.num_added += 1
        max_tokens = int(rng.integers(1, self.max_output_tokens + 1))
        return f"r{self.num_added}", self.prompt(rng), max_tokens


def add_if_it_fits(engine: DryEngine, req_id: str, prompt: Sequence[int], max_tokens: int) -> bool:
    """Submit a request; False where the engine refuses it for its size."""
    try:
        engine.add(req_id, prompt, max_tokens)
    except ConfigError:
        return False
    return True


def reset_prefix_cache(engine: DryEngine, *, preempt: bool) -> None:
    """Forget cached prefixes, as an operator does; `preempt` takes running requests' blocks too."""
    engine.scheduler.reset_prefix_cache(reset_running_requests=preempt)


def finish_all(engine: DryEngine, max_steps: int = 4000) -> None:
    """Step until nothing is left, then check that everything was given back.

    Raises:
        InvariantViolation: a check failed, or the engine makes no progress.
    """
    for _ in range(max_steps):
        if not engine.has_unfinished():
            break
        engine.step()
    else:
        waiting = [r.request_id for r in engine.scheduler.requests.values()]
        raise InvariantViolation("conservation", f"no end after {max_steps} steps: {waiting}")
    wrong = engine.check_idle()
    if wrong:
        raise InvariantViolation("conservation", "; ".join(wrong))


def drive(
    engine: DryEngine, seed: int, num_actions: int = 60, workload: Workload | None = None
) -> None:
    """Random arrivals, steps, aborts and cache resets; then run to the end."""
    rng, workload = np.random.default_rng(seed), workload or Workload()
    for _ in range(num_actions):
        action = rng.random()
        if action < 0.35:
            add_if_it_fits(engine, *workload.request(rng))
        elif action < 0.90:
            for _ in range(int(rng.integers(1, 8))):
                engine.step()
        elif action < 0.95:
            known = sorted(engine.scheduler.requests)
            if known:
                engine.abort([known[int(rng.integers(len(known)))]])
        else:
            reset_prefix_cache(engine, preempt=bool(rng.random() < 0.3))
    finish_all(engine)
