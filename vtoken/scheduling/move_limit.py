"""At most so many tokens are moved in a step (`max_moves_per_step`); other evictions wait.

An eviction that waits changes nothing: the request stays due and keeps its tokens for some steps
more. One that moves nothing never waits. One that moves more than the limit goes alone, so that
it does not wait for ever; with a limit of 0 tokens are moved only when the pool runs short.
"""

from __future__ import annotations


class MoveLimit:
    """What is left of one step's limit."""

    def __init__(self, max_moves: int) -> None:
        self.max_moves = max_moves
        self.num_moves = 0

    def begin_step(self) -> None:
        self.num_moves = 0

    def take(self, num_moves: int, is_needed: bool = False) -> bool:
        """Whether an eviction that moves at most this many tokens may go ahead; counts it if so.

        Args:
            is_needed: the pool is short: it goes ahead whatever it moves.
        """
        fits = self.num_moves + num_moves <= self.max_moves
        goes_alone = self.num_moves == 0 and self.max_moves > 0
        if num_moves and not (fits or goes_alone or is_needed):
            return False
        self.num_moves += num_moves
        return True
