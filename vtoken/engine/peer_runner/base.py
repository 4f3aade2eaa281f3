"""What the engines have in common: refusals, and a closed loop."""

from __future__ import annotations


class Refused(Exception):
    """A setting of the user's is wrong: the option, its value, and what is allowed."""

    def __init__(self, option: str, value: object, allowed: str) -> None:
        self.answer = {"option": option, "value": str(value), "allowed": allowed}
        super().__init__(f"{option} {value}: {allowed}")


def closed_loop(engine, requests: list, concurrency: int, clock) -> tuple[list, int]:
    """Keep up to `concurrency` requests in an engine that has `add` and `step`.

    Returns:
        [submitted_s, [token_s, ...]] of every request, and the most that were in at a time.
    """
    waiting = list(enumerate(requests))[::-1]
    times: list = [None] * len(requests)
    running, most, start = 0, 0, clock()
    while waiting or running:
        while waiting and running < concurrency:
            index, (ids, num) = waiting.pop()
            times[index] = [clock() - start, []]
            engine.add(index, ids, num)
            running += 1
        most = max(most, running)
        for index, num_new, is_finished in engine.step():
            times[index][1] += [clock() - start] * num_new
            running -= is_finished
    return times, most
