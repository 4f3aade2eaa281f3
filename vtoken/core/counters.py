"""What a run counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from vtoken.core.messages import StepPlan
from vtoken.core.ops import Change


@dataclass(slots=True)
class Counters:
    """Running totals of one scheduler; what results call vtoken_<name>.

    A relocation event is one request in one step whose KV moved or whose blocks were released.
    `dropped_blocks` are references given up; `released_blocks` of them went back to the pool
    (a shared block that others still use does not). `copies` are evictions that copied survivors
    out of shared or cached blocks, into `copied_blocks` new ones; `copies_declined` those where
    it would have taken more than it released. `wrong_victims` are answers of a policy that could
    not be carried out: the oldest tokens went instead.
    """

    evicted_tokens: int = 0
    moved_tokens: int = 0
    released_blocks: int = 0
    dropped_blocks: int = 0
    reused_slots: int = 0
    relocation_events: int = 0
    eviction_events: int = 0
    shared_tokens_skipped: int = 0
    copies: int = 0
    copies_declined: int = 0
    copied_blocks: int = 0
    repacking_moves: int = 0
    preemptions: int = 0
    wrong_victims: int = 0
    hook_calls: int = 0
    plan_s: float = 0.0
    finalize_s: float = 0.0

    def note_evicted(self, changes: Sequence[Change], num_ids: int) -> None:
        """Changes were carried out that took this many ids."""
        self.evicted_tokens += num_ids
        self.eviction_events += len(changes)

    def note_placed(self, changes: Sequence[Change], plan: StepPlan) -> list[int]:
        """What `TableOps.place` said of changes, in any order.

        Returns:
            Tokens that move, by change.
        """
        self.moved_tokens += len(plan.move_source)
        self.reused_slots += len([i for i in plan.new_token_index.tolist() if i >= 0])
        by_request = dict(zip(plan.req_ids, plan.num_moves(), strict=True))
        num_moves = [by_request[c.table.req_id] for c in changes]
        for change, moved in zip(changes, num_moves, strict=True):
            if not change.released:
                self.repacking_moves += moved
            if change.has_evicted and (moved or change.released):
                self.relocation_events += 1
        return num_moves

    def as_dict(self) -> dict[str, float]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def reset(self) -> None:
        for f in fields(self):
            setattr(self, f.name, f.default)
