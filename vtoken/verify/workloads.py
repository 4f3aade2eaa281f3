"""Small workloads that make many relocations, and vToken settings to go with them."""

from __future__ import annotations

from vtoken.workloads.request import WorkloadRequest
from vtoken.workloads.synthetic import random_prompts, shared_prefix_prompts


def staggered_prompts(
    num: int, prompt_len: int, output_len: int, vocab_size: int, seed: int, repeat: int
) -> list[WorkloadRequest]:
    """Random prompts, two and two of a length: pairs evict in one step, others in others."""
    requests = []
    for i in range(num):
        length = prompt_len + 3 * (i // 2)
        request = random_prompts(
            1, length, output_len, vocab_size=vocab_size, seed=seed, repeat=repeat * num + i
        )[0]
        requests.append(request)
    return requests


def sharing_prompts(
    num: int, prompt_len: int, output_len: int, vocab_size: int, seed: int, repeat: int
) -> list[WorkloadRequest]:
    """Random prompts after a prefix of whole blocks of 32, shared two and two.

    Args:
        prompt_len: tokens of a prompt's own. Shared ones do not count against a budget while
            another request holds their blocks, so they are on top of it.
    """
    prefix_len = max(32, prompt_len // 64 * 32)
    return shared_prefix_prompts(
        num, output_len, degree=2, prefix_len=prefix_len, suffix_len=prompt_len,
        vocab_size=vocab_size, seed=seed, repeat=repeat,
    )  # fmt: skip
