"""Eviction policies. README.md beside this file says how to add one.

    from vtoken.policies import Policy, RequestView, ScoreKind, lowest
"""

from vtoken.policies.base import NO_IDS, Policy, RequestView, ScoreKind
from vtoken.policies.selection import lowest

__all__ = ["NO_IDS", "Policy", "RequestView", "ScoreKind", "lowest"]
