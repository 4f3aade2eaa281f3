"""One line of a scan or a replay: a mode and a policy."""

from __future__ import annotations

from dataclasses import dataclass

from vtoken.config import VTokenConfig


@dataclass(frozen=True)
class Series:
    """A mode, and the policy where the mode evicts ("" where not)."""

    mode: str
    policy: str

    def config(self, base: VTokenConfig) -> VTokenConfig:
        """vToken's settings for this line."""
        update = {"mode": self.mode} | ({"policy": self.policy} if self.policy else {})
        return base.model_copy(update=update)

    def __str__(self) -> str:
        return f"{self.mode} ({self.policy})" if self.policy else self.mode
