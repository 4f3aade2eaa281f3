"""A dry engine that checks itself after every step.

    engine = CheckedDryEngine(DrySettings(...), config, victims=my_reference)
    drive(engine, seed=3, num_actions=60)

vLLM's real scheduler runs with vToken's hooks; `WorkerModel` applies every StepPlan to KV that
carries its origin; `Oracle` says what should be there. A fault can be put in between: a plan that
is damaged on its way to the worker (`vtoken.verify.catalogue.PLAN_FAULTS`) must be noticed.
"""

from __future__ import annotations

import copy
from collections import Counter

import numpy as np

from vtoken.config import VTokenConfig
from vtoken.core.invariants import check_step_plan
from vtoken.core.messages import StepPlan
from vtoken.engine.dry import DryEngine, DrySettings
from vtoken.errors import InvariantViolation
from vtoken.testing.worker_model import WorkerModel
from vtoken.verify.fault import Fault
from vtoken.verify.oracle import HashBook, Oracle, Victims, made_up_score

GROUP_ID_BYTES = 4  # vLLM appends the number of the cache group to a cached block's hash


class CheckedDryEngine(DryEngine):
    """A dry engine whose worker is a `WorkerModel`; every step is held against an `Oracle`.

    Args:
        victims: see `Oracle`.
        fault: one of PLAN_FAULTS, applied to the copy of each plan that the worker gets.

    Attributes:
        num_faults: plans that the fault changed.
        num_hits: blocks that prefix hits brought in.
        has_failed: a check failed; nothing more can be said about this engine.

    `step` raises InvariantViolation, with the name of the broken invariant.
    """

    def __init__(
        self, settings: DrySettings, config: VTokenConfig | None = None, *,
        victims: Victims | None = None, fault: Fault | None = None, seed: int = 0,
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
        self.has_failed = False
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

    def step(self, max_steps: int | None = None):
        self._wrong.clear()
        self._note_protected()
        self.has_failed = True  # unless this step gets to its end
        new_tokens, finished = super().step(1)
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
        self.has_failed = False
        return new_tokens, finished

    def _shared_blocks(self) -> set[int]:
        """Blocks that several requests hold."""
        owners = Counter(b for row in self.rows().values() for b in set(row))
        return {b for b, n in owners.items() if n > 1} - {0}

    def _note_protected(self) -> None:
        """Ids that sit in blocks of several requests, by what the worker's slots say."""
        shared, N = self._shared_blocks(), self.block_size
        self._protected = {
            req_id: {
                label[1]
                for b in shared.intersection(row)
                for label in self.model.labels[b * N : (b + 1) * N]
                if label is not None
            }
            for req_id, row in self.rows().items()
        }

    def _run_worker(self, scheduler_output) -> None:
        plan = getattr(scheduler_output, "vtoken", None)
        step_seq = self.hooks.clock.seq if self.hooks is not None else self.num_steps
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
            if self.fault.make(damaged, self._rng):
                self.num_faults += 1
                plan = damaged
        self.model.execute(scheduler_output, plan)
        for req_id, read in self.model.reads.items():
            wrong = self.oracle.compute(req_id, step_seq, read)
            self._wrong += [("I3", w) for w in wrong]

    def _check_plan(self, plan: StepPlan) -> None:
        rows, N = self.rows(), self.block_size
        wrong = check_step_plan(plan, self.model.num_blocks * N, self._shared_blocks(), N)
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
        entries, self.hooks.trace.entries = self.hooks.trace.entries, []
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
        for req_id, state in self.hooks.requests.by_id.items():
            table = state.table
            ids = table.live_ids()
            if self.oracle.victims is None:
                # Unscheduled requests leave no trace: what the engine holds must be a subset.
                self.oracle.follow(req_id, ids)
            elif req_id not in self.model.reads:
                shared = self._protected.get(req_id, set())
                self.oracle.pass_over(req_id, self.hooks.clock.seq, shared, ids)
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
        self._learn_hashes()
        for block in self.block_pool.blocks:
            if block.block_hash is not None:
                plain_hash = bytes(block.block_hash)[:-GROUP_ID_BYTES]
                wrong = self.hashes.check_block(block.block_id, plain_hash, self.model.kv)
                self._wrong += [("I1", w) for w in wrong]
