"""`check_policy`: does an eviction policy keep its contract? For tests of built-in and user policies.

    from vtoken.testing import check_policy
    check_policy(MyPolicy)                      # the class with several parameter sets
    check_policy(MyPolicy(stride_tokens=8))     # one instance

or, for any registered policy: `python -m vtoken.testing.policies NAME`.

A policy is asked about made-up requests, empty and tiny ones included, and about whole lives of
requests from prompt to last token. Every answer is held against the contract of
`vtoken.policies.base`; the first breach raises an AssertionError that says what was wrong and in
which request.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator

import numpy as np

from vtoken.errors import ConfigError
from vtoken.policies.base import Policy, ScoreKind
from vtoken.testing.policy_cases import PolicyCase, live_lives, random_case, special_cases


def check_policy(
    policy: Policy | type[Policy], *, cases: int = 150, seed: int = 0, allow_fewer: bool = False
) -> None:
    """Check that a policy keeps its contract.

    Args:
        policy: an instance, or a class to be tried with several sets of sinks and windows.
        cases: random requests for each instance; the special ones and whole lives come on top.
        seed: of the random requests.
        allow_fewer: let the policy name fewer ids than it could. The engine then holds more
            tokens than the budget, and its concurrency estimate no longer applies.

    Raises:
        AssertionError: the contract is broken; one sentence says how, and for which request.
    """
    for instance in _instances(policy):
        _check_declaration(instance)
        gen = np.random.default_rng([seed, 1])
        requests = [*special_cases(instance, seed)]
        requests += [random_case(instance, gen) for _ in range(cases)]
        _check_answers(instance, requests, allow_fewer)
        live_lives(instance, seed, lambda case, p=instance: _checked(p, case, allow_fewer))


def _instances(policy: Policy | type[Policy]) -> Iterator[Policy]:
    """The instance itself; of a class, its defaults and other sinks, windows and blocks."""
    if not isinstance(policy, type):
        yield policy
        return
    assert issubclass(policy, Policy), f"{policy.__name__} is not a subclass of Policy"
    try:
        yield policy()
    except Exception as error:
        raise AssertionError(
            f"{policy.__name__}() cannot be built: {type(error).__name__}: {error}; "
            "every parameter needs a default"
        ) from error
    for parameters in (
        {"block_size": 32},
        {"sink_tokens": 0, "recent_tokens": 0},
        {"sink_tokens": 2, "recent_tokens": 5},
    ):
        try:
            yield policy(**parameters)
        except ConfigError:
            continue  # a policy may refuse parameters that mean nothing to it


def _check_declaration(policy: Policy) -> None:
    """Name, score kind, and a budget that sinks and recent window leave room in."""
    name = type(policy).__name__
    assert isinstance(policy, Policy), f"{name} is not a subclass of Policy"
    assert isinstance(policy.name, str) and policy.name, f"{name} has no name"
    assert isinstance(policy.score_kind, ScoreKind), f"{name}: score_kind is no ScoreKind"
    for budget in (policy.floor_tokens, policy.floor_tokens + 1, 4 * policy.floor_tokens + 100):
        kept = policy.sink_tokens + policy.recent(budget)
        assert policy.recent(budget) >= 0 and kept <= budget, (
            f"{policy.name} keeps {policy.sink_tokens} sinks and {policy.recent(budget)} recent "
            f"tokens at a budget of {budget}: the budget cannot be met"
        )


def _check_answers(policy: Policy, cases: list[PolicyCase], allow_fewer: bool) -> None:
    """Ask about every request three times: in order, backwards, and with lazy arrays."""
    answers = [_ask(policy, case, entropy=1) for case in cases]
    for case, victims in zip(cases, answers, strict=True):
        _check_answer(policy, case, victims, allow_fewer)
    for case, victims in zip(reversed(cases), reversed(answers), strict=True):
        again = _ask(policy, case, entropy=2)
        assert set(again) == set(victims), (
            f"{policy.name} names other ids when asked again about the same request: a decision "
            f"may depend on the view alone (chance from view.rng(), no memory), in {case}"
        )
    for case, victims in zip(cases, answers, strict=True):
        lazily = _ask(policy, case, entropy=1, lazy=True)
        assert set(lazily) == set(victims), (
            f"{policy.name} names other ids when live ids and scores are computed on first use, "
            f"in {case}"
        )


def _checked(policy: Policy, case: PolicyCase, allow_fewer: bool) -> np.ndarray:
    """Ask once, check the answer and return it."""
    victims = _ask(policy, case)
    _check_answer(policy, case, victims, allow_fewer)
    return victims


def _ask(policy: Policy, case: PolicyCase, *, entropy: int = 0, lazy: bool = False) -> np.ndarray:
    """Call `evict` with the global generators set to `entropy`, and see that nothing is changed."""
    view = case.view(lazy=lazy)
    before = random.getstate(), np.random.get_state()
    random.seed(entropy)
    np.random.seed(entropy)
    try:
        victims = policy.evict(view)
    except Exception as error:
        raise AssertionError(
            f"{policy.name} raises {type(error).__name__}: {error}, in {case}"
        ) from error
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
    for field, value in vars(case).items():
        now = getattr(view, field)
        same = now is value if value is None else np.array_equal(now, value, equal_nan=True)
        assert same, f"{policy.name} changes its view's {field}, in {case}"
    assert isinstance(victims, np.ndarray) and victims.ndim == 1, (
        f"{policy.name} returns {type(victims).__name__}, not a numpy array of one dimension, "
        f"in {case}"
    )
    assert np.issubdtype(victims.dtype, np.integer), (
        f"{policy.name} returns an array of {victims.dtype}, not of whole numbers, in {case}"
    )
    return victims.copy()


def _check_answer(policy: Policy, case: PolicyCase, victims: np.ndarray, allow_fewer: bool) -> None:
    """Hold one answer against the contract."""
    ids, length = case.live_ids, case.num_computed_tokens
    recent = policy.recent(case.budget_tokens)
    unscored = np.empty(0) if case.scores is None else ids[np.isnan(case.scores)]

    def never(bad: np.ndarray, what: str) -> None:
        listed = ", ".join(map(str, bad[:5])) + (", ..." if len(bad) > 5 else "")
        assert not len(bad), f"{policy.name} evicts {what} ({listed}), in {case}"

    values, counts = np.unique(victims, return_counts=True)
    never(values[counts > 1], "an id twice")
    never(np.setdiff1d(victims, ids), "ids that are not live")
    never(values[values < policy.sink_tokens], f"sinks, ids below {policy.sink_tokens}")
    never(values[values < case.protected_tokens], "protected ids of blocks shared with others")
    never(values[values >= length - recent], f"ids of the recent window of {recent} tokens")
    never(np.intersect1d(values, unscored), "ids that have no score yet")
    assert len(victims) <= case.num_evict, (
        f"{policy.name} evicts {len(victims)} ids, more than num_evict, in {case}"
    )
    first = max(policy.sink_tokens, case.protected_tokens)
    free = ids[(ids >= first) & (ids < length - recent) & ~np.isin(ids, unscored)]
    could = min(case.num_evict, len(free))
    assert allow_fewer or len(victims) == could, (
        f"{policy.name} evicts {len(victims)} ids where {could} could go, so the request stays "
        f"above its budget, in {case}"
    )


def main() -> None:
    """Check registered policies by name; exit code 1 where one breaks its contract."""
    from vtoken.policies.registry import policy_class

    if len(sys.argv) < 2:
        sys.exit("usage: python -m vtoken.testing.policies NAME [NAME ...]")
    for name in sys.argv[1:]:
        try:
            check_policy(policy_class(name))
        except ConfigError as error:
            print(error, file=sys.stderr)
            sys.exit(error.exit_code)
        except AssertionError as error:
            sys.exit(f"{name}: {error}")
        print(f"{name}: keeps the contract")


if __name__ == "__main__":
    main()
