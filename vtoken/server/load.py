"""Load on running servers through the real `openai` client: what `vtoken load` does.

One server: many clients at once. Each streams one completion or chat after another, every one with
a prompt of its own, and counts what came back. Two servers: time between tokens at concurrency 1,
asked in turn.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import numpy as np

from vtoken.server.terminal import is_local, read_state, state_url

TEXT = "the canal ran uphill past seven locks and a mill that ground nothing but slow rain"
WORDS = TEXT.split()
_TO_THE_END = {"ignore_eos": True}


@dataclass
class LoadReport:
    """Attributes:
    completed, chunks: streams that ended as they should, and what they held.
    failed: sentences about requests that did not.
    stuck: clients that had not ended long after the time was over.
    pool: what the server says afterwards; empty without a status page.
    """

    clients: int
    seconds: float
    completed: int = 0
    chunks: int = 0
    failed: list[str] = field(default_factory=list)
    stuck: int = 0
    pool: dict = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        held = self.pool.get("owned", 0)
        return not (self.failed or self.stuck or held) and self.completed > 0


def prompt_of(client: int, number: int, num_words: int) -> str:
    """A prompt that no other request has, so that the prefix cache cannot help."""
    words = (WORDS[(client * 7 + number * 3 + i) % len(WORDS)] for i in range(num_words))
    return f"{client} {number} " + " ".join(words)


def run_load(
    url: str,
    *,
    model: str,
    clients: int,
    seconds: float,
    max_tokens: int = 200,
    prompt_words: int = 40,
    api_key: str | None = None,
    patience_s: float = 300.0,
) -> LoadReport:
    """Keep `clients` streams going for `seconds`; see the module's head."""
    report, lock = LoadReport(clients, seconds), threading.Lock()
    end = time.monotonic() + seconds
    api = _client(url, api_key, timeout=patience_s, max_retries=0)

    def one_client(index: int) -> None:
        number = 0
        while time.monotonic() < end:
            number += 1
            try:
                stream = _stream if (index + number) % 2 else _stream_chat
                text = prompt_of(index, number, prompt_words)
                chunks, reason = stream(api, model, text, max_tokens)
                wrong = None if reason == "length" else f"ended with {reason!r}"
            except Exception as error:  # noqa: BLE001 - a failed request is a result here
                chunks, wrong = 0, f"{type(error).__name__}: {error}"
            with lock:
                report.chunks += chunks
                if wrong:
                    report.failed.append(f"client {index}, request {number}: {wrong}")
                else:
                    report.completed += 1

    threads = [threading.Thread(target=one_client, args=(i,), daemon=True) for i in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end + patience_s - time.monotonic()))
    report.stuck = sum(t.is_alive() for t in threads)
    report.pool = _pool_when_idle(url, api_key)
    return report


def _client(url: str, api_key: str | None, **options):
    import openai

    if is_local(urlsplit(url).hostname):  # never through a proxy
        options["http_client"] = openai.DefaultHttpxClient(trust_env=False)
    return openai.OpenAI(base_url=f"{url}/v1", api_key=api_key or "none", **options)


def _stream(api, model: str, prompt: str, max_tokens: int) -> tuple[int, str | None]:
    return _count_chunks(
        api.completions.create(
            model=model, prompt=prompt, max_tokens=max_tokens, stream=True, extra_body=_TO_THE_END
        )
    )


def _stream_chat(api, model: str, prompt: str, max_tokens: int) -> tuple[int, str | None]:
    return _count_chunks(
        api.chat.completions.create(
            model=model, messages=[{"role": "user", "content": prompt}], max_tokens=max_tokens,
            stream=True, extra_body=_TO_THE_END,
        )
    )  # fmt: skip


def _count_chunks(stream) -> tuple[int, str | None]:
    chunks, reason = 0, None
    for chunk in stream:
        chunks += 1
        reason = chunk.choices[0].finish_reason or reason
    return chunks, reason


def _pool_when_idle(url: str, api_key: str | None) -> dict:
    """Blocks of all engines after the last request; the newest answer if they never all return."""
    pool: dict = {}
    for _ in range(50):
        try:
            engines = read_state(state_url(url), api_key)["engines"]
        except Exception:  # noqa: BLE001 - no page is not a failure of the load
            return {}
        pool = {k: sum(e["blocks"][k] for e in engines) for k in ("usable", "owned")}
        pool["preemptions"] = sum(e["counters"].get("preemptions", 0) for e in engines)
        pool["evicted_tokens"] = sum(e["counters"].get("evicted_tokens", 0) for e in engines)
        if not pool["owned"]:
            break
        time.sleep(0.2)
    return pool


def paired_gaps_s(
    urls: tuple[str, str], *, pairs: int, max_tokens: int, api_key: str | None = None
) -> np.ndarray:
    """Ask two servers for the same tokens, in alternating order, one request at a time.

    What else the machine does meets both halves of a pair.

    Returns:
        float64[pairs, 2], median seconds between two chunks of one streamed completion.
    """
    asked = [(_client(url, api_key), first_model(url, api_key)) for url in urls]
    gaps = np.zeros((pairs, 2))
    for pair in range(-1, pairs):  # the first one warms up
        for which in (0, 1) if pair % 2 else (1, 0):
            gap = _median_gap_s(*asked[which], prompt_of(which, pair + 1, 40), max_tokens)
            if pair >= 0:
                gaps[pair, which] = gap
    return gaps


def _median_gap_s(api, model: str, prompt: str, max_tokens: int) -> float:
    times = [
        time.perf_counter()
        for _ in api.completions.create(
            model=model, prompt=prompt, max_tokens=max_tokens, temperature=0, stream=True,
            extra_body=_TO_THE_END,
        )
    ]  # fmt: skip
    return float(np.median(np.diff(times)))


def first_model(url: str, api_key: str | None) -> str:
    """The first model that a server has."""
    return _client(url, api_key).models.list().data[0].id
