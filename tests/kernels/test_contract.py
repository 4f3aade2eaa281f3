"""Each implementation offers the contract's methods, with the contract's arguments."""

from __future__ import annotations

import inspect

import pytest
import torch
from kernel_problems import make_problem, reference

from vtoken.kernels import contract

METHODS = ("probe", "plan", "attention", "move", "key_norms")


def arguments(method) -> list[tuple]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(method).parameters.values()]


def test_the_contract_is_these_methods():
    public = {name for name in vars(contract.Kernels) if not name.startswith("_")}
    assert public == set(METHODS)


@pytest.mark.parametrize("method", METHODS)
def test_arguments_are_those_of_the_contract(kernels, method):
    promised, offered = getattr(contract.Kernels, method), getattr(type(kernels), method)
    assert arguments(offered) == arguments(promised)
    assert promised.__doc__


def test_names_and_plans_are_as_promised(kernels):
    assert kernels.name and kernels.why
    problem = make_problem(queries=[1, 0, 4], lens=[100, 9, 50], seed=1)
    counts = problem.plan(kernels).num_live_tokens
    assert counts.dtype == torch.int32
    assert counts.tolist() == [len(problem.slots(0)), 0, len(problem.slots(2))]


def test_probing_gives_the_layout_that_the_kernels_read(kernels):
    problem = make_problem(queries=[1, 3], lens=[40, 20], block_size=32, k_group=16, seed=2)
    layout = kernels.probe(
        lambda k, v, kv, slots: problem.layout.scatter(kv, slots, k, v), problem.kv
    )
    assert layout == problem.layout
    out, (want, _) = torch.zeros_like(problem.query), reference(problem)
    kernels.attention(
        problem.plan(kernels), problem.query, problem.kv, out, layout=layout, scale=problem.scale
    )
    assert torch.allclose(out.double(), torch.from_numpy(want), atol=1e-6)
