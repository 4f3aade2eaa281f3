"""The step that is under way, and which requests it has served."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class StepClock:
    """Attributes:
    seq: number of the step.
    served: requests that got slots in this step: their block tables are out, and must not change.
    num_idle_steps: steps in a row in which requests ran and none was served.
    """

    seq: int = 0
    served: set[str] = field(default_factory=set)
    num_idle_steps: int = 0

    def advance(self, any_running: bool) -> None:
        """Begin the next step."""
        self.seq += 1
        is_idle = any_running and not self.served
        self.num_idle_steps = self.num_idle_steps + 1 if is_idle else 0
        self.served.clear()
