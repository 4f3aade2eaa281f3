"""A Hypothesis state machine over vLLM's real scheduler: arrivals, steps, aborts, cache resets.

    from hypothesis.stateful import run_state_machine_as_test
    run_state_machine_as_test(scheduler_machine(victims=my_reference))

Every step is checked by `CheckedDryEngine`: tables against the pool, plans, KV against an oracle,
cached blocks against the tokens that their hashes stand for. At the end every block must be back.
With a fault (`vtoken.verify.catalogue.PLAN_FAULTS`) the machine must fail. Needs `hypothesis`.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from vtoken.config import VTokenConfig
from vtoken.engine.dry import DrySettings
from vtoken.testing.engines import CheckedDryEngine
from vtoken.testing.random_work import add_if_it_fits, finish_all, shared_prefix
from vtoken.verify.fault import Fault
from vtoken.verify.oracle import Victims

POLICIES = ("random", "streaming-llm", "sliding-window", "h2o", "tova", "knorm", "snapkv")
BLOCK_SIZE = 4


def dry_settings() -> st.SearchStrategy[DrySettings]:
    """Small pools, chunked prefills, prefix caching on and off, both schedulers."""
    return st.builds(
        lambda num_seqs, batch, **rest: DrySettings(
            block_size=BLOCK_SIZE, max_model_len=160, num_kv_heads=1, head_size=8,
            max_num_seqs=num_seqs, max_num_batched_tokens=max(num_seqs, batch), **rest,
        ),
        num_seqs=st.sampled_from([8, 3, 16]),
        batch=st.sampled_from([16, 8, 40, 160]),
        num_kv_blocks=st.integers(8, 48),
        enable_prefix_caching=st.booleans(),
        async_scheduling=st.booleans(),
    )  # fmt: skip


def configs() -> st.SearchStrategy[VTokenConfig]:
    """All modes; budgets, intervals and thresholds from tight to none."""
    budget = st.one_of(
        st.fixed_dictionaries({"kv_budget_tokens": st.integers(13, 32)}),
        st.fixed_dictionaries({"eviction_ratio": st.sampled_from([0.5, 0.3, 0.75])}),
    )
    evicting = st.fixed_dictionaries(
        {
            "mode": st.sampled_from(["vtoken", "vtoken", "vtoken", "naive"]),
            "policy": st.sampled_from(POLICIES),
            "eviction_interval_tokens": st.sampled_from([None, 1, 2, 3, 7]),
            "fragmentation_threshold": st.sampled_from([0.0, 0.3, 0.6]),
            "seed": st.integers(0, 3),
        }
    )
    both = st.builds(lambda a, b: VTokenConfig.from_mapping(a | b), evicting, budget)
    return st.one_of(both, both, both, st.just(VTokenConfig(mode="indirection")))


class SchedulerMachine(RuleBasedStateMachine):
    """See the module's head; made by `scheduler_machine`."""

    victims: Victims | None = None
    fault: Fault | None = None

    def __init__(self) -> None:
        super().__init__()
        self.engine: CheckedDryEngine | None = None
        self.num_added = 0

    @initialize(settings=dry_settings(), config=configs())
    def start(self, settings: DrySettings, config: VTokenConfig) -> None:
        cls = type(self)
        self.engine = CheckedDryEngine(settings, config, victims=cls.victims, fault=cls.fault)

    @rule(
        prefix=st.sampled_from([None, 0, 1]),
        num_shared=st.integers(1, 24),
        tail=st.lists(st.integers(40, 43), min_size=1, max_size=40),
        max_tokens=st.integers(1, 50),
    )
    def arrive(self, prefix, num_shared, tail, max_tokens) -> None:
        head = [] if prefix is None else shared_prefix(prefix, num_shared)
        self.num_added += 1
        add_if_it_fits(self.engine, f"r{self.num_added}", head + tail, max_tokens)

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    def _has_requests(self) -> bool:
        return self.engine is not None and bool(self.engine.scheduler.requests)

    @precondition(_has_requests)
    @rule(which=st.integers(0, 15))
    def abort(self, which: int) -> None:
        known = sorted(self.engine.scheduler.requests)
        self.engine.abort([known[which % len(known)]])

    @precondition(_has_requests)
    @rule(preempt=st.booleans())
    def reset(self, preempt: bool) -> None:
        self.engine.scheduler.reset_prefix_cache(reset_running_requests=preempt)

    def teardown(self) -> None:
        if self.engine is not None and not self.engine.has_failed:
            finish_all(self.engine, max_steps=1500)


def scheduler_machine(
    victims: Victims | None = None, fault: Fault | None = None
) -> type[SchedulerMachine]:
    """A machine class with an independent policy implementation, and perhaps a fault.

    Args:
        victims: see `vtoken.verify.oracle`; None takes the engine's evictions on trust.
        fault: damages plans on their way to the worker; the machine must then fail.
    """
    # A function as a class attribute would become a method.
    attributes = {"victims": victims and staticmethod(victims), "fault": fault}
    return type("SchedulerMachine", (SchedulerMachine,), attributes)
