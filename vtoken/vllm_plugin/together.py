"""Victims of many requests in one step, named by one call of their policy where it can do that.

For requests that decode, share no block and fill all their holes at once: the steady state. What
each of them needs on its own is in `vtoken.vllm_plugin.choosing`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import compress

import numpy as np

from vtoken.core.batch import ScoredIds, Tables
from vtoken.core.table import NO_SLOTS
from vtoken.policies.base import BatchView
from vtoken.vllm_plugin.running import Running


class JointChooser:
    """Part of SchedulerHooks; see the module's head."""

    def __init__(self, hooks, chooser) -> None:
        self.hooks, self.chooser, self.planner = hooks, chooser, hooks.planner

    def split(self, due: list[Running]) -> tuple[list[Running], list[Running]]:
        """Tell requests whose evictions can be carried out at once, together, from the others."""
        if not self.chooser.joins:
            return [], due
        hooks, together, alone = self.hooks, [], []
        sharing, caching = hooks.shares.sharing, hooks.caching
        for state in due:
            request = state.request
            # More than one is due: a prompt's chunk, or output that is computed again.
            known = request.num_tokens + request.num_output_placeholders
            if (
                known - request.num_computed_tokens > 1
                or request.request_id in sharing
                or state.budget is None
                or (caching and self._has_foreign_blocks(state.blocks))
            ):
                alone.append(state)
            else:
                together.append(state)
        return together, alone

    def _has_foreign_blocks(self, blocks: list) -> bool:
        """Whether a request holds blocks that are shared, or are to be copied out of."""
        shares = self.hooks.shares
        return shares.shared(blocks) is not None or shares.wants_copy(blocks)

    def decide(self, states: list[Running]) -> tuple[list[Running], np.ndarray, list[int]]:
        """Victims of requests that `split` put together, where they are due.

        Returns:
            (states, ids int[K], counts) of those that lose some, ids request by request.
        """
        lengths, batch = self._synced(states)
        if not self.chooser.limits_moves and self._have_one_policy(states):
            budgets = states[0].budget.all_tokens(lengths)
            num_evict = [t.num_live_tokens - n for t, n in zip(batch.tables, budgets, strict=True)]
            least = states[0].budget.interval_tokens
            return self._choose_together(states, batch, lengths, budgets, num_evict, least)
        due, numbers = [], []
        for state, length in zip(states, lengths, strict=True):
            num_evict = self.planner.num_to_evict(state, length)
            if num_evict < state.budget.interval_tokens:
                self.chooser.schedule_next(state, length)
            else:
                due.append(state)
                numbers.append(num_evict)
        return self._choose_each(due, numbers, self.chooser.limit_moves)

    def choose(
        self, states: list[Running], num_evict: list[int]
    ) -> tuple[list[Running], np.ndarray, list[int]]:
        """Victims of requests that `split` put together, so many of each at most; as `decide`."""
        lengths, batch = self._synced(states)
        if not self._have_one_policy(states):
            return self._choose_each(states, num_evict)
        budgets = states[0].budget.all_tokens(lengths)
        return self._choose_together(states, batch, lengths, budgets, num_evict, 1)

    def _synced(self, states: list[Running]) -> tuple[list[int], Tables]:
        lengths = [s.request.num_computed_tokens for s in states]
        batch = Tables([s.table for s in states])
        self.hooks.sync_all(states, batch, lengths)
        return lengths, batch

    @staticmethod
    def _have_one_policy(states: list[Running]) -> bool:
        """Whether one call of their policy can name victims of all these requests."""
        budget = states[0].budget
        return budget.policy.evict_many is not None and all(s.budget is budget for s in states)

    def _choose_each(
        self, states: list[Running], num_evict: list[int], limit: Callable | None = None
    ) -> tuple[list[Running], np.ndarray, list[int]]:
        """Let each request's own policy name victims.

        Args:
            limit: (vLLM's request) takes its plan back where it has to wait.
        """
        hooks = self.hooks
        for state, count in zip(states, num_evict, strict=True):
            self.chooser.choose(state.request, state, count, None)
            if limit is not None:
                limit(state.request)
        named = [(state, hooks.plans.pop(state.table.req_id, None)) for state in states]
        named = [(state, ids) for state, ids in named if ids is not None]
        parts = [ids for _, ids in named]
        counts = [len(ids) for ids in parts]
        return [s for s, _ in named], np.concatenate(parts) if parts else NO_SLOTS, counts

    def _choose_together(
        self,
        states: list[Running],
        batch: Tables,
        lengths: list[int],
        budgets: list[int],
        num_evict: list[int],
        least: int,
    ) -> tuple[list[Running], np.ndarray, list[int]]:
        """Let the one policy of all these requests, none of which shares blocks, name victims.

        Args:
            least: who would lose fewer is not due yet.
        """
        budget = states[0].budget
        scored: list[ScoredIds] = []
        ready = [n >= least for n in num_evict]
        if self.chooser.needs_scores(states[0]):
            self._find_reports(states, ready, scored)
        if not all(ready):
            for state, length, n in zip(states, lengths, num_evict, strict=True):
                if n < least:
                    self.chooser.schedule_next(state, length)
            states, lengths, budgets, num_evict = (
                list(compress(part, ready)) for part in (states, lengths, budgets, num_evict)
            )
            if not states:
                return [], NO_SLOTS, []
            batch = Tables([s.table for s in states])
        view = self._view(states, batch, lengths, budgets, num_evict, scored)
        ids, counts = budget.policy.evict_many(view)
        if 0 in counts:
            states, counts = list(compress(states, counts)), [n for n in counts if n]
        return states, ids, counts

    def _find_reports(
        self, states: list[Running], ready: list[bool], scored: list[ScoredIds]
    ) -> None:
        """Put the scores of those who are ready into `scored`; who has none is not ready."""
        find = self.hooks.reports.scored_ids
        for e, state in enumerate(states):
            if not ready[e]:
                continue
            part = find(state.table.req_id, self.chooser.report_step(state.request))
            if part is None:  # see VictimChooser.choose
                state.next_eviction_len = state.request.num_computed_tokens
                ready[e] = False
            else:
                scored.append(part)

    def _view(self, states, batch: Tables, lengths, budgets, num_evict, scored) -> BatchView:
        ops, seed = batch.arena.ops, self.planner.settings.seed

        def lowest_scored(first_ids, end_ids, sign):
            return ops.lowest_scored(batch, scored, first_ids, end_ids, num_evict, sign)

        def draw(num_candidates, counts):
            parts = zip(states, lengths, strict=True)
            entropy = [(seed, s.prompt_hash, n) for s, n in parts]  # as RequestView.rng
            return ops.draw(entropy, num_candidates, counts)

        return BatchView(
            num_computed_tokens=lengths,
            budget_tokens=budgets,
            num_evict=num_evict,
            oldest=batch.oldest,
            lowest_scored=lowest_scored if scored else None,
            count_below=batch.count_below,
            at_ranks=batch.at_ranks,
            draw=draw,
        )
