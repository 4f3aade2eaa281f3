"""Many clients at once against a running server, through the real `openai` client.

    python -m vtoken.server.load http://127.0.0.1:8000 --clients 64 --seconds 120

Each client streams one completion or chat after another, every one with a prompt of its own, and
counts what came back. Ends with 1 when a request failed, a stream was cut short, or the pool did
not come back.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from dataclasses import asdict, dataclass, field

from vtoken.server.terminal import read_state, state_url

TEXT = "the canal ran uphill past seven locks and a mill that ground nothing but slow rain"
WORDS = TEXT.split()


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
    """A prompt nobody else sends, so that the prefix cache cannot help."""
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
    import openai

    report, lock = LoadReport(clients, seconds), threading.Lock()
    end = time.monotonic() + seconds
    api = openai.OpenAI(
        base_url=f"{url}/v1", api_key=api_key or "none", timeout=patience_s, max_retries=0
    )

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


def _stream(api, model: str, prompt: str, max_tokens: int) -> tuple[int, str | None]:
    chunks, reason = 0, None
    for chunk in api.completions.create(
        model=model, prompt=prompt, max_tokens=max_tokens, stream=True,
        extra_body={"ignore_eos": True},
    ):  # fmt: skip
        chunks += 1
        reason = chunk.choices[0].finish_reason or reason
    return chunks, reason


def _stream_chat(api, model: str, prompt: str, max_tokens: int) -> tuple[int, str | None]:
    chunks, reason = 0, None
    for chunk in api.chat.completions.create(
        model=model, messages=[{"role": "user", "content": prompt}], max_tokens=max_tokens,
        stream=True, extra_body={"ignore_eos": True},
    ):  # fmt: skip
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


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("url")
    parser.add_argument("--model", default=None, help="default: the first one the server has")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--prompt-words", type=int, default=40)
    parser.add_argument("--api-key", default=None)
    given = parser.parse_args()
    url = given.url.rstrip("/")
    model = given.model or _first_model(url, given.api_key)
    report = run_load(
        url, model=model, clients=given.clients, seconds=given.seconds,
        max_tokens=given.max_tokens, prompt_words=given.prompt_words, api_key=given.api_key,
    )  # fmt: skip
    print(json.dumps({**asdict(report), "passed": report.passed}, indent=2))
    return 0 if report.passed else 1


def _first_model(url: str, api_key: str | None) -> str:
    import openai

    return openai.OpenAI(base_url=f"{url}/v1", api_key=api_key or "none").models.list().data[0].id


if __name__ == "__main__":
    sys.exit(main())
