"""Which methods of an engine belong to which phase of a step.

vLLM's methods are named here. Ours are found where they override vLLM's: the time inside the
override, but not inside vLLM's method of that name below it, is what our hook costs. So a hook
that is added later is timed without a change here.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from vtoken.experiments.profile.timer import REST, PhaseTimer

SCHEDULE, PLAN, FINALISE, TRANSPORT = "schedule", "plan", "finalise", "transport"
APPLY, MOVES, INPUTS, LAYOUTS = "apply", "moves", "inputs", "layouts"
ATTENTION = "attention"
SCORES, MODEL, SAMPLING, HOOKS = "scores", "rest of the model", "sampling", "hooks"

PHASES = (
    SCHEDULE, PLAN, FINALISE, HOOKS, TRANSPORT, APPLY, MOVES, INPUTS, LAYOUTS, ATTENTION, SCORES,
    MODEL, SAMPLING, REST,
)  # fmt: skip
"""In the order of a step. `hooks` is the overrides themselves, around vLLM's methods; `layouts`
is physical lengths and slots, and the plan that our attention kernels read."""

OURS = (PLAN, FINALISE, HOOKS, APPLY, MOVES, LAYOUTS, SCORES)
"""Phases that stock vLLM does not have."""

_SCHEDULER = {"schedule": SCHEDULE, "update_from_output": REST}
_RUNNER = {"execute_model": INPUTS, "_model_forward": MODEL, "sample_tokens": SAMPLING}
_HOOKS = {"begin": PLAN, "on_allocate": PLAN, "finish": FINALISE, "take_report": SCORES}
_RUNNER_HOOKS = {
    "_vtoken_apply": APPLY, "_vtoken_use_physical_lengths": LAYOUTS, "vtoken_move": MOVES,
}  # fmt: skip
_ATTENTION_HOOKS = {"begin_step": LAYOUTS, "end_step": SCORES}
_NOT_IN_A_STEP = {"load_model", "initialize_kv_cache", "get_kv_cache_spec", "add_request"}


def watch_scheduler(timer: PhaseTimer, engine) -> None:
    """Time the scheduler's side of a step; of real and dry engines alike."""
    scheduler = engine.scheduler
    manager = scheduler.kv_cache_manager.coordinator.single_type_managers[0]
    for name, phase in _SCHEDULER.items():
        timer.wrap(scheduler, name, HOOKS if overridden(scheduler, name) else phase, name)
    if engine.hooks is None:
        return
    for thing in (scheduler, manager):
        for name, stock in overrides(thing):
            if name not in _SCHEDULER:
                timer.wrap(thing, name, HOOKS, f"vtoken {name}")
            timer.wrap(stock, name, _SCHEDULER.get(name, SCHEDULE), name)
    # Replaced on the instance; what was there before is kept under the second name.
    timer.wrap(scheduler.kv_cache_manager, "allocate_slots", HOOKS, "vtoken allocate_slots")
    timer.wrap(scheduler, "_vllm_allocate_slots", SCHEDULE, "allocate_slots")
    for name, phase in _HOOKS.items():
        timer.wrap(engine.hooks, name, phase, name)


def watch_engine(timer: PhaseTimer, engine) -> None:
    """Time all of a real engine's step; put the timer on after `reconfigure`, not before."""
    watch_scheduler(timer, engine)
    runner, executor = engine.runner, engine.core.model_executor
    for name in ("execute_model", "sample_tokens"):
        timer.wrap(executor, name, TRANSPORT, f"executor {name}")
    timer.wrap(executor.driver_worker.worker, "execute_model", INPUTS, "worker execute_model")
    for name, phase in _RUNNER.items():
        timer.wrap(runner, name, HOOKS if overridden(runner, name) else phase, f"runner {name}")
    timer.wrap(runner.model, "compute_logits", MODEL)
    for layer in _attention_layers(runner):
        timer.wrap(layer.impl, "forward", ATTENTION, "attention")
    if engine.hooks is None:
        return
    for name, stock in overrides(runner):
        if name not in _RUNNER:
            timer.wrap(runner, name, HOOKS, f"vtoken {name}")
        timer.wrap(stock, name, _RUNNER.get(name, INPUTS), f"runner {name}")
    for name, phase in _RUNNER_HOOKS.items():
        timer.wrap(runner, name, phase, name.strip("_"))
    attention = runner.vtoken_attention
    for name, phase in _ATTENTION_HOOKS.items():
        timer.wrap(attention, name, phase, f"attention {name}")
    timer.wrap(attention.kernels, "attention", _kernel_phase, "kernel")


def _kernel_phase(args: tuple, kwargs: dict) -> str:
    """Scores alone, or an output (with scores, where they are wanted)."""
    output = args[3] if len(args) > 3 else kwargs["out"]
    return SCORES if output is None else ATTENTION


def _attention_layers(runner) -> list:
    context = runner.compilation_config.static_forward_context
    layers = [x for x in context.values() if hasattr(x, "impl") and hasattr(x, "kv_cache")]
    assert layers, "no attention layers"
    return layers


def overridden(thing: Any, name: str) -> bool:
    """Whether a class of ours overrides this method."""
    return any(n == name for n, _ in overrides(thing))


def overrides(thing: Any) -> Iterator[tuple[str, type]]:
    """Methods that a vToken class overrides, each with the vLLM class that has it below."""
    classes = type(thing).__mro__
    seen = set(_NOT_IN_A_STEP)
    for cls in classes:
        if not cls.__module__.startswith("vtoken."):
            continue
        for name, value in vars(cls).items():
            if name in seen or name.startswith("__") or not inspect.isfunction(value):
                continue
            stock = next((c for c in classes if _is_stock(c) and name in vars(c)), None)
            if stock is not None:
                seen.add(name)
                yield name, stock


def _is_stock(cls: type) -> bool:
    return not cls.__module__.startswith("vtoken.") and cls is not object
