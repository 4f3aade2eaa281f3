"""Random requests, aborts and cache resets for a dry engine.

drive(CheckedDryEngine(DrySettings(...), config, victims=my_reference), seed=3)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from vtoken.engine.dry import DryEngine
from vtoken.errors import ConfigError, InvariantViolation


def shared_prefix(which: int, num_tokens: int) -> list[int]:
    """The first tokens of one of the prefixes that prompts share."""
    return [20 + (which * 7 + i) % 13 for i in range(num_tokens)]


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
        head = shared_prefix(which, cut) if which >= 0 else []
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
            engine.scheduler.reset_prefix_cache(reset_running_requests=bool(rng.random() < 0.3))
    finish_all(engine)
