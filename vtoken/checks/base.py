"""What is checked, under which invariant's name, and the tally of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

INVARIANTS = ("I1", "I2", "I3", "I4", "conservation", "positions", "scores")

# check -> what it says. The part before the dot is the invariant a failure is reported under.
CHECKS = {
    "I1.ids": "the live ids are those before the step, less the evicted ones",
    "I1.written": "a token's K and V are what was computed for it, however often it moved",
    "I1.relocated": "a token's K and V are the same before and after a relocation",
    "I2.table": "each live token has one slot, each slot one token; moved tokens stand in their destination",
    "I2.worker": "the worker reads each live token from the slot in which the table has it",
    "I3.order": "moves run before attention reads; nothing touches their slots in between",
    "I4.plan": "no slot is written twice, nothing shared is written, all slots lie in the pool",
    "I4.snapshot": "every plan was made in its own step, from the layout it changes",
    "conservation.request": "live + holes + tail slots are the owned slots",
    "conservation.pool": "free + owned + null blocks are the pool; reference counts match",
    "positions": "the model sees logical ids as positions",
    "scores": "a token's score moves along with it",
}


def invariant_of(check: str) -> str:
    """The invariant a check belongs to."""
    return check.split(".")[0]


def _zeros() -> dict[str, int]:
    return dict.fromkeys(INVARIANTS, 0)


@dataclass
class Tally:
    """How often each invariant was checked, and how often it failed.

    Attributes:
        events: per invariant. I1, I2, I4: relocation events; I3: steps with moves; conservation:
            relocation events; positions: tokens given to the model; scores: relocation events
            of requests with scores.
        violations: per invariant.
        changes: layout changes compared, those without a relocation (holes left) included.
        hashed_tokens: token hashes taken, before and after counted apart.
        off: checks left out, to show that each of them is needed.
    """

    events: dict[str, int] = field(default_factory=_zeros)
    violations: dict[str, int] = field(default_factory=_zeros)
    changes: int = 0
    hashed_tokens: int = 0
    off: frozenset[str] = frozenset()

    def is_on(self, check: str) -> bool:
        assert check in CHECKS, check
        return check not in self.off

    def count(self, invariant: str, events: int = 1) -> None:
        self.events[invariant] += events

    def add(self, other: Tally) -> None:
        """Add another tally's numbers to these."""
        self.add_counts(other.counts())
        self.changes += other.changes
        self.hashed_tokens += other.hashed_tokens

    def counts(self) -> dict[str, list[int]]:
        """Events and violations per invariant: what crosses between processes."""
        found = {name: [self.events[name], self.violations[name]] for name in INVARIANTS}
        return {name: pair for name, pair in found.items() if any(pair)}

    def add_counts(self, counts: Mapping[str, Sequence[int]]) -> None:
        """Add what another tally's `counts` gave."""
        for name, (events, violations) in counts.items():
            self.events[name] += events
            self.violations[name] += violations

    def rows(self) -> list[dict[str, object]]:
        """Result rows, one per invariant."""
        return [
            {"name": n, "events": self.events[n], "violations": self.violations[n]}
            for n in INVARIANTS
        ]
