"""Keep every n-th token of the past as a landmark, and the newest block in full."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from vtoken.policies import Policy, RequestView


@dataclass(frozen=True, kw_only=True)
class EveryNth(Policy):
    """Drop what lies between the landmarks, oldest first; landmarks go last."""

    name: ClassVar[str] = "my-policy"

    stride_tokens: int = 4

    def evict(self, view: RequestView) -> np.ndarray:
        ids = self.candidates(view)
        is_landmark = ids % self.stride_tokens == 0
        return np.concatenate([ids[~is_landmark], ids[is_landmark]])[: view.num_evict]
