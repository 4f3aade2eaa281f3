"""How many tokens a request will generate, learnt from those that finished."""

from __future__ import annotations


class OutputLengths:
    """A running estimate of how many tokens a request will generate.

    Exponentially weighted mean and deviation over finished requests; the estimate is their sum
    with one deviation, never more than a request may generate.
    """

    UNKNOWN_TOKENS = 512  # before anybody finished, for requests without a limit of their own

    def __init__(self, weight: float = 0.1) -> None:
        self.weight = weight
        self.num_seen = 0
        self._mean = self._square = 0.0

    def add(self, num_output_tokens: int) -> None:
        """Take in a finished request."""
        self.num_seen += 1
        w = max(self.weight, 1.0 / self.num_seen)
        self._mean += w * (num_output_tokens - self._mean)
        self._square += w * (num_output_tokens**2 - self._square)

    def estimate(self, max_tokens: int, is_limited: bool) -> int:
        """Tokens a new request will probably generate.

        Args:
            max_tokens: what it may generate at most.
            is_limited: it asked for that limit itself (else it is what the model's length leaves).
        """
        if self.num_seen == 0:
            return max_tokens if is_limited else min(max_tokens, self.UNKNOWN_TOKENS)
        deviation = max(0.0, self._square - self._mean**2) ** 0.5
        return min(max_tokens, int(self._mean + deviation) + 1)
