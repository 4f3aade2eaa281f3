"""`vtoken load`: load on a running server, or two servers against each other."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from vtoken.errors import ConfigError
from vtoken_cli.command import command
from vtoken_cli.delivery import end
from vtoken_cli.given import Run
from vtoken_cli.options import Opt
from vtoken_cli.parsers import count, duration_s

OWN = (
    Opt("url", positional=True, help="The server's address."),
    Opt("other_url", positional=True, help="A second server: compares the time between tokens."),
    Opt("model", metavar="NAME", default="the server's first", help="What to ask for."),
    Opt("clients", parse=count, metavar="N", default="64", help="One server: streams at once."),
    Opt("seconds", parse=duration_s, metavar="TIME", default="2m", help="One server: how long."),
    Opt("prompt_words", parse=count, metavar="N", default="40", help="One server: of each prompt."),
    Opt("pairs", parse=count, metavar="N", default="30", help="Two servers: measured pairs."),
    Opt("max_tokens", parse=count, metavar="TOKENS", default="200, of two servers 128",
        help="Of each answer."),
    Opt("api_key", metavar="KEY", help="The server's key."),
)  # fmt: skip


@command(*OWN, config=False)
def load(run: Run) -> None:
    """Put load on a running server with many clients; or compare two servers, one request at a time.

    Exit code 1: a request failed, a stream was cut short, or the pool did not come back.
    """
    given = dict(run.own)
    if "url" not in given:
        raise ConfigError("URL", "", "a server's address, as in http://127.0.0.1:8000")
    urls = [given.pop(key).rstrip("/") for key in ("url", "other_url") if key in given]
    found = _load(urls[0], given) if len(urls) == 1 else _compare(tuple(urls), given)
    for name, value in found.items():
        run.out.print(f"{name.replace('_', ' ')}: {value}")
    run.out.result(found)
    end(failed=not found.get("passed", True))


def _load(url: str, given: dict[str, Any]) -> dict[str, Any]:
    from vtoken.server.load import first_model, run_load

    model = given.pop("model", None) or first_model(url, given.get("api_key"))
    given.pop("pairs", None)
    report = run_load(url, model=model, **{"clients": 64, "seconds": 120.0, **given})
    return {**asdict(report), "passed": report.passed}


def _compare(urls: tuple[str, str], given: dict[str, Any]) -> dict[str, Any]:
    import numpy as np

    from vtoken.experiments.report.statistics import median_interval
    from vtoken.server.load import paired_gaps_s

    pairs = given.get("pairs", 30)
    gaps_s = paired_gaps_s(
        urls, pairs=pairs, max_tokens=given.get("max_tokens", 128), api_key=given.get("api_key")
    )
    ratio, *interval = median_interval(gaps_s[:, 1] / gaps_s[:, 0])
    medians_ms = [float(x) for x in np.median(gaps_s, axis=0) * 1e3]
    return {
        "pairs": pairs, "median_ratio": ratio, "interval": interval, "median_itl_ms": medians_ms,
    }  # fmt: skip
