"""Time spent in methods, each moment counted once, without a line in the code that is timed.

    timer = PhaseTimer()
    timer.wrap(scheduler, "schedule", "schedule")
    timer.wrap(hooks, "begin", "plan")                 # called inside schedule()
    with timer:                                        # wrappers go on, and come off again
        new_tokens, finished = timer.run_step(engine.step)
    timer.steps[-1].phases_s                           # {"schedule": ..., "plan": ...}

A phase gets the time of its methods less that of the timed methods below them. The wrappers' own
cost, under a microsecond a call, counts in: what is reported is an upper bound.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

Phase = str | Callable[[tuple, dict], str]
REST = "output"  # of a step, what no wrapped method accounts for


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Attributes:
    total_s: the whole step, on the timer's clock.
    phases_s: seconds by phase; they add up to the total.
    """

    total_s: float
    phases_s: dict[str, float]

    def share(self, phases) -> float:
        """Fraction of the step that these phases took."""
        return self.sum_s(phases) / self.total_s

    def sum_s(self, phases) -> float:
        return sum(self.phases_s.get(p, 0.0) for p in phases)


@dataclass(frozen=True, slots=True)
class Span:
    """One call: `start_ns` on the timer's clock."""

    name: str
    phase: str
    start_ns: int
    duration_ns: int


@dataclass(frozen=True, slots=True)
class _Wrap:
    owner: Any
    name: str
    phase: Phase
    label: str


class PhaseTimer:
    """See the module's head.

    Args:
        clock_ns: `time.thread_time_ns` leaves out what other processes took of the core, and may
            be used where one thread does all the work.

    Attributes:
        steps: of every `run_step`.
        spans: every timed call, where asked for.
    """

    def __init__(
        self, *, keep_spans: bool = False, clock_ns: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        self.keep_spans, self.clock_ns = keep_spans, clock_ns
        self.steps: list[StepTimes] = []
        self.spans: list[Span] = []
        self._wraps: list[_Wrap] = []
        self._undo: list[Callable[[], None]] = []
        self._children_ns: list[int] = []  # per open call, time of timed calls below it
        self._phases_ns: dict[str, int] = defaultdict(int)

    def wrap(self, owner: Any, name: str, phase: Phase, label: str = "") -> None:
        """Time a method of an object, or of a class for all objects of it.

        Args:
            phase: its name, or a function of the call's (args, kwargs) that gives it.
        """
        assert callable(getattr(owner, name, None)), f"{type(owner).__name__} has no {name}()"
        assert not self._undo, "wrappers are on already"
        self._wraps.append(_Wrap(owner, name, phase, label or name))

    def __enter__(self) -> Self:
        for wrap in self._wraps:
            self._undo.append(self._put_on(wrap))
        return self

    def __exit__(self, *exc) -> None:
        while self._undo:
            self._undo.pop()()

    def _put_on(self, wrap: _Wrap) -> Callable[[], None]:
        own = vars(wrap.owner)
        had = wrap.name in own
        # Of a class the plain function, so that it still binds; of an object the bound method.
        is_class = isinstance(wrap.owner, type)
        assert had or not is_class, f"{wrap.owner.__name__} inherits {wrap.name}()"
        before = own[wrap.name] if had else getattr(wrap.owner, wrap.name)
        setattr(wrap.owner, wrap.name, self.timed(before, wrap.phase, wrap.label))

        def undo() -> None:
            if had:
                setattr(wrap.owner, wrap.name, before)
            else:
                delattr(wrap.owner, wrap.name)

        return undo

    def timed(self, function: Callable, phase: Phase, label: str) -> Callable:
        """The function, with its time added to a phase."""
        clock, children = self.clock_ns, self._children_ns

        def timed_call(*args, **kwargs):
            name = phase if isinstance(phase, str) else phase(args, kwargs)
            children.append(0)
            start = clock()
            try:
                return function(*args, **kwargs)
            finally:
                spent = clock() - start
                self._phases_ns[name] += spent - children.pop()
                if children:
                    children[-1] += spent
                if self.keep_spans:
                    self.spans.append(Span(label, name, start, spent))

        return timed_call

    def run_step(self, step: Callable[[], Any]) -> Any:
        """Run one step of an engine and keep where its time went."""
        assert not self._children_ns, "a step is running"
        self._phases_ns.clear()
        before = self.clock_ns()
        result = self.timed(step, REST, "step")()
        total_ns = self.clock_ns() - before
        phases = dict(self._phases_ns)
        phases[REST] += total_ns - sum(phases.values())
        self.steps.append(StepTimes(total_ns * 1e-9, {p: ns * 1e-9 for p, ns in phases.items()}))
        return result
