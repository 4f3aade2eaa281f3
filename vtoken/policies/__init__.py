"""Eviction policies: what a policy author imports. README.md beside this file says how to add one."""

from vtoken.policies.base import NO_IDS, Policy, RequestView, Rule, ScoreKind
from vtoken.policies.selection import lowest

__all__ = ["NO_IDS", "Policy", "RequestView", "Rule", "ScoreKind", "lowest"]
