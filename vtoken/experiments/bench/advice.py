"""Advice from measured points, in words: where reclaiming pays, and where it does not.

Nothing is interpolated: a crossover is said to lie between two points that were measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median

Row = Mapping[str, object]

TIE_FRAC = 0.02  # what differs by less is called equal


def advise(suite: str, rows: Sequence[Row]) -> list[str]:
    """Sentences for a suite's rows; none where it has nothing to advise."""
    return _ADVICE[suite](rows) if suite in _ADVICE else []


def _memory(rows: Sequence[Row]) -> list[str]:
    known = [
        row["throughput_over_native"]
        for row in rows
        if row["mode"] == "vtoken" and row.get("throughput_over_native") is not None
    ]
    if not known:
        return []
    ratio = median(known)
    said = _against(ratio)
    return [
        f"Where all requests fit at once, vToken was {said} native and lost tokens: use native."
    ]


def _sla(rows: Sequence[Row]) -> list[str]:
    lines = []
    for workload, policy in _groups(rows, "workload", "pool_policy"):
        group = [r for r in rows if (r["workload"], r["pool_policy"]) == (workload, policy)]
        lines += _by_pool(f"{workload}, {policy}", group)
        for frac in sorted({r["pool_frac"] for r in group}, reverse=True):
            pool = [r for r in group if r["pool_frac"] == frac]
            lines += _by_concurrency(f"{workload}, {policy}, {_pool(pool[0])}", pool)
    return lines


def _by_pool(head: str, rows: Sequence[Row]) -> list[str]:
    """At each mode's own C_sel: in which pools vToken was faster than native."""
    gains = {
        row["pool_frac"]: 1 + row["gain_over_native"]
        for row in rows
        if row["mode"] == "vtoken" and row.get("gain_over_native") is not None
    }
    if not gains:
        return []
    text = crossover(
        sorted(gains.items(), reverse=True),
        lambda frac: f"a pool of {100 * frac:g} % of naive's demand",
    )
    return [f"{head}, within the limit: {text}."]


def _by_concurrency(head: str, rows: Sequence[Row]) -> list[str]:
    """At the same concurrency: from how many requests on vToken was faster than native."""
    ratios = sorted(
        (row["concurrency"], row["throughput_over_native"])
        for row in rows
        if row["mode"] == "vtoken" and row.get("throughput_over_native") is not None
    )
    if not ratios:
        return []
    return [f"{head}: {crossover(ratios, lambda n: f'{n} requests at once')}."]


def crossover(points: Sequence[tuple[object, float]], name: Callable[[object], str]) -> str:
    """Say where vToken overtakes native.

    Args:
        points: (where, vToken's throughput over native's), from ease to shortage.
        name: a point in words.
    """
    wins = [is_faster(ratio) for _, ratio in points]
    first, last = points[0], points[-1]
    if len(points) == 1:
        return f"at {name(first[0])} vToken is {_against(first[1])} native"
    if not any(wins):
        best = max(points, key=lambda p: p[1])
        return (
            f"native was at least as fast at all measured points, from {name(first[0])} to "
            f"{name(last[0])} (vToken at best {_against(best[1])} it, at {name(best[0])}): use "
            "native"
        )
    if all(wins):
        return (
            f"vToken was faster at all measured points: {_against(first[1])} native at "
            f"{name(first[0])}, {_against(last[1])} it at {name(last[0])}"
        )
    at = wins.index(True)
    if at and all(wins[at:]):
        before, after = points[at - 1], points[at]
        return (
            f"up to {name(before[0])} use native (vToken is {_against(before[1])} it there), from "
            f"{name(after[0])} on vToken is faster ({_against(after[1])} native)"
        )
    parts = ", ".join(f"{_against(ratio)} native at {name(where)}" for where, ratio in points)
    return f"no clear crossover; vToken was {parts}"


def is_faster(ratio: float) -> bool:
    """Whether vToken's throughput is above native's by more than a tie."""
    return ratio > 1 + TIE_FRAC


def _against(ratio: float) -> str:
    percent = 100 * abs(ratio - 1)
    if percent <= 100 * TIE_FRAC:
        return "as fast as"
    return f"{percent:.0f} % {'faster' if ratio > 1 else 'slower'} than"


def _pool(row: Row) -> str:
    return f"{row['pool_blocks']:,} blocks"


def _groups(rows: Sequence[Row], *keys: str) -> list[tuple]:
    return list(dict.fromkeys(tuple(row[key] for key in keys) for row in rows))


def _prefix(rows: Sequence[Row]) -> list[str]:
    """Whether copying survivors out of shared blocks released more than leaving them alone."""
    lines = []
    for (policy,) in _groups([r for r in rows if r["mode"] == "vtoken"], "policy"):
        by_kind = {
            kind: {
                r["sharing_degree"]: r.get("vtoken_retained_blocks_per_request")
                for r in rows
                if (r["mode"], r["policy"], r.get("shared_prefix")) == ("vtoken", policy, kind)
            }
            for kind in ("protect", "copy")
        }
        better = [
            degree
            for degree, blocks in by_kind["copy"].items()
            if blocks and blocks < 0.98 * (by_kind["protect"].get(degree) or 0)
        ]
        if better:
            listed = ", ".join(map(str, sorted(better)))
            lines.append(f"{policy}: --shared-prefix copy holds fewer blocks at degree {listed}.")
        elif by_kind["copy"]:
            lines.append(
                f"{policy}: --shared-prefix copy saved nothing over protect at the measured degrees."
            )
    return lines


_ADVICE = {"memory": _memory, "sla": _sla, "prefix": _prefix}
