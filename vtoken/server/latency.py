"""Time between tokens at concurrency 1: two running servers, asked in turn.

    vtoken serve --mode native --port 8000 &   vtoken serve --policy h2o --port 8001 &
    python -m vtoken.server.latency http://127.0.0.1:8000 http://127.0.0.1:8001 --pairs 30

Each pair asks both servers for the same tokens, in alternating order, and compares the medians of
the gaps between chunks. The answer is the median ratio over pairs with a bootstrap interval: what
else the machine does meets both halves of a pair.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import numpy as np

from vtoken.server.load import _first_model, prompt_of


def median_gap_s(api, model: str, prompt: str, max_tokens: int) -> float:
    """Median seconds between two chunks of one streamed completion."""
    times = [
        time.perf_counter()
        for _ in api.completions.create(
            model=model, prompt=prompt, max_tokens=max_tokens, temperature=0, stream=True,
            extra_body={"ignore_eos": True},
        )
    ]  # fmt: skip
    return float(np.median(np.diff(times)))


def compare(
    first_url: str, second_url: str, *, pairs: int, max_tokens: int, api_key: str | None = None
) -> dict:
    """Ratio of the second server's gaps to the first one's.

    Returns:
        median_ratio, interval (95 %, bootstrap over pairs), and both medians in milliseconds.
    """
    import openai

    asked = []
    for url in (first_url, second_url):
        api = openai.OpenAI(base_url=f"{url.rstrip('/')}/v1", api_key=api_key or "none")
        asked.append((api, _first_model(url.rstrip("/"), api_key)))
    gaps = np.zeros((pairs, 2))
    for pair in range(-1, pairs):  # the first one warms up
        order = (0, 1) if pair % 2 else (1, 0)
        for which in order:
            api, model = asked[which]
            gap = median_gap_s(api, model, prompt_of(which, pair + 1, 40), max_tokens)
            if pair >= 0:
                gaps[pair, which] = gap
    ratios = gaps[:, 1] / gaps[:, 0]
    draws = np.random.default_rng(0).choice(ratios, (5000, pairs))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    return {
        "pairs": pairs,
        "median_ratio": float(np.median(ratios)),
        "interval": [float(low), float(high)],
        "median_itl_ms": [float(x) for x in np.median(gaps, axis=0) * 1e3],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("first_url")
    parser.add_argument("second_url")
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--api-key", default=None)
    given = parser.parse_args()
    found = compare(
        given.first_url, given.second_url, pairs=given.pairs, max_tokens=given.max_tokens,
        api_key=given.api_key,
    )  # fmt: skip
    print(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
