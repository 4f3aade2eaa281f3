"""Record which ids died at which logical length, and evict exactly those in another run.

Two modes that evict alike can still drift apart: sums of floats in another order, other chunks,
another admission. A paired run therefore records the decisions of one mode and replays them in
the other, with prefill chunks cut at the recorded lengths, so that both hold the same live ids at
every logical length.

The file has one JSON object a line. The first says what was run:

    {"schema": "vtoken-decisions/1", "policy": "h2o", ..., "model": "tiny-llama", "block_size": 16}

then, in the order in which things happened,

    {"prompt": HASH, "nth": 0, "preemptions": 0, "length": 64, "ids": [9, 12, ...]}   ids died
    {"prompt": HASH, "nth": 0, "preemptions": 0, "length": 90, "end": "finished"}     or "preempted"

A request is known by its prompt, by how many requests with that prompt arrived before it, and by
how often it has been preempted: request ids differ from run to run.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from vtoken.errors import ConfigError
from vtoken.recording.line_file import LineFile
from vtoken.units import read_text

SCHEMA = "vtoken-decisions/1"
RECORD, REPLAY = "--record-decisions", "--replay-decisions"

# Both runs must agree on these: else a result would bear the name of a policy that did not run.
_SAME = (
    "policy", "policy_args", "eviction_ratio", "kv_budget_tokens", "sink_tokens", "recent_tokens",
    "interval_tokens", "model",
)  # fmt: skip


class RequestKey(NamedTuple):
    """What a request is called in files: the same in every run with the same arrivals.

    Attributes:
        prompt: hash of the prompt's token ids.
        nth: requests with this prompt that arrived before.
    """

    prompt: str
    nth: int


def prompt_hash(prompt_token_ids: Sequence[int]) -> str:
    """16 hexadecimal digits that stand for a prompt."""
    ids = np.asarray(prompt_token_ids, np.int32)
    return blake2b(ids.tobytes(), digest_size=8).hexdigest()


class RequestKeys:
    """Keys of the requests that are in the scheduler, given out in the order of arrival."""

    def __init__(self) -> None:
        self._keys: dict[str, RequestKey] = {}
        self._arrived: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def arrive(self, req_id: str, prompt_token_ids: Sequence[int]) -> RequestKey:
        """Name a request that enters the scheduler."""
        prompt = prompt_hash(prompt_token_ids)
        nth = self._arrived.get(prompt, 0)
        self._arrived[prompt] = nth + 1
        key = self._keys[req_id] = RequestKey(prompt, nth)
        return key

    def of(self, req_id: str) -> RequestKey:
        return self._keys[req_id]

    def forget(self, req_id: str) -> None:
        """A request is over (not: preempted)."""
        self._keys.pop(req_id, None)


def decisions_header(config, budget, *, model: str, block_size: int) -> dict:
    """The first line of a file: what the decisions depend on."""
    return {
        "schema": SCHEMA,
        "mode": config.mode,
        "policy": config.policy,
        "policy_args": json.loads(json.dumps(config.policy_args)),  # tuples become lists
        "eviction_ratio": budget.eviction_ratio,
        "kv_budget_tokens": budget.kv_budget_tokens,
        "sink_tokens": budget.policy.sink_tokens,
        "recent_tokens": budget.policy.recent_tokens,
        "interval_tokens": budget.interval_tokens,
        "score_queries": config.score_queries,
        "seed": config.seed,
        "model": model,
        "block_size": block_size,
    }


class DecisionRecorder(LineFile):
    """Writes decisions to a file, one JSON line each.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: str, header: dict) -> None:
        super().__init__(RECORD, path, header)

    def died(self, key: RequestKey, num_preemptions: int, length: int, ids: np.ndarray) -> None:
        """Ids were evicted when this many tokens were computed."""
        self._add(key, num_preemptions, length, ids=np.sort(ids).tolist())

    def ended(self, key: RequestKey, num_preemptions: int, length: int, how: str) -> None:
        """The request lost its KV at this length: "finished" or "preempted"."""
        self._add(key, num_preemptions, length, end=how)

    def _add(self, key: RequestKey, num_preemptions: int, length: int, **what) -> None:
        self.append({**key._asdict(), "preemptions": num_preemptions, "length": length, **what})


@dataclass(slots=True)
class Track:
    """The recorded decisions of one request between two preemptions.

    Attributes:
        lengths: ascending logical lengths; ids[i] died when lengths[i] tokens were computed.
        end_length: tokens computed when its KV went; the last recorded length if unknown.
        end: "finished", "preempted" or "" (unknown).
    """

    lengths: list[int] = field(default_factory=list)
    ids: list[np.ndarray] = field(default_factory=list)
    end_length: int = 0
    end: str = ""

    def next_length(self, length: int) -> int | None:
        """The first recorded length >= this one."""
        i = bisect_left(self.lengths, length)
        return self.lengths[i] if i < len(self.lengths) else None

    def ids_at(self, length: int) -> np.ndarray:
        i = bisect_left(self.lengths, length)
        assert i < len(self.lengths) and self.lengths[i] == length, (length, self.lengths)
        return self.ids[i]

    def cut(self, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Shorten a chunk so that it does not run over the next recorded length."""
        i = bisect_right(self.lengths, num_computed_tokens)
        if i == len(self.lengths):
            return num_new_tokens
        return min(num_new_tokens, self.lengths[i] - num_computed_tokens)


class DecisionReplay:
    """Recorded decisions, looked up by request.

    A request that is preempted more often than it was when recorded follows its last recorded
    track again from the start: the same ids die at the same lengths. One that is preempted later
    than it was cannot be followed and is an error. Past the recorded end of a finished request
    (an output grew longer than it was) the policy decides again.
    """

    def __init__(self, path: str, expected: dict) -> None:
        """Read a file.

        Raises:
            ConfigError: no such file, not of this schema, damaged, or of another policy, budget
                or model than `expected`, the header this run would write.
        """
        self.path = path
        self._tracks: dict[RequestKey, dict[int, Track]] = {}
        lines = _read_lines(path)
        self.header = _parse(path, 1, lines[0]) if lines else {}
        if self.header.get("schema") != SCHEMA:
            raise ConfigError(REPLAY, path, f"a file that {RECORD} wrote, of schema {SCHEMA}")
        self._check_header(expected)
        for number, line in enumerate(lines[1:], 2):
            self._read(number, line)

    def _check_header(self, expected: dict) -> None:
        for name in _SAME:
            recorded, ours = self.header.get(name), expected[name]
            if name == "model" and (recorded is None or ours is None):
                continue  # a dry run has no model
            if recorded != ours:
                raise ConfigError(
                    REPLAY, self.path, f"recorded with {name} {recorded!r}, this run has {ours!r}"
                )

    def _read(self, number: int, line: str) -> None:
        entry = _parse(self.path, number, line)
        try:
            key = RequestKey(str(entry["prompt"]), int(entry["nth"]))
            epoch, length = int(entry["preemptions"]), int(entry["length"])
            ids = np.array(entry["ids"], np.int32) if "ids" in entry else None
            end = str(entry["end"]) if ids is None else ""
        except (KeyError, TypeError, ValueError, OverflowError):
            raise ConfigError(REPLAY, self.path, f"line {number} is not a decision") from None
        track = self._tracks.setdefault(key, {}).setdefault(epoch, Track())
        track.end_length = max(track.end_length, length)
        if ids is None:
            track.end = end
            return
        if ids.ndim != 1 or (track.lengths and track.lengths[-1] >= length):
            raise ConfigError(REPLAY, self.path, f"line {number} is out of order")
        track.lengths.append(length)
        track.ids.append(ids)

    def track(self, key: RequestKey, num_preemptions: int) -> Track:
        """The decisions that a request follows after this many preemptions.

        Raises:
            ConfigError: nothing was recorded of such a request.
        """
        epochs = self._tracks.get(key)
        if epochs is None:
            raise self.misfit(key, "no such request was recorded")
        if num_preemptions in epochs:
            return epochs[num_preemptions]
        return epochs[max(epochs)]

    def due(self, key: RequestKey, track: Track, num_computed_tokens: int) -> int | None:
        """The recorded length at which ids die next, now included; None: past the recorded end.

        Raises:
            ConfigError: the request lives on where the recorded one was preempted.
        """
        length = track.next_length(num_computed_tokens)
        if length is None and track.end == "preempted" and num_computed_tokens > track.end_length:
            raise self.misfit(
                key,
                f"it was preempted at {track.end_length} tokens when recorded; "
                "record with a pool that holds all requests",
            )
        if length is None and num_computed_tokens > track.end_length:
            return None
        return track.end_length + 1 if length is None else length

    def check_start(self, key: RequestKey, track: Track, num_hit_tokens: int) -> None:
        """Refuse a prefix hit that reaches over a recorded length.

        Raises:
            ConfigError: it does.
        """
        if track.lengths and num_hit_tokens > track.lengths[0]:
            raise self.misfit(
                key,
                f"the prefix cache gives {num_hit_tokens} tokens, ids died at {track.lengths[0]}; "
                "turn prefix caching off in both runs",
            )

    def check_ids(
        self, key: RequestKey, length: int, ids: np.ndarray, evictable: np.ndarray
    ) -> None:
        """Refuse ids that cannot die now.

        Args:
            evictable: int32, live ids that are in no block of another request.

        Raises:
            ConfigError: names the first of them.
        """
        wrong = ids[~np.isin(ids, evictable)]
        if len(wrong):
            raise self.misfit(
                key, f"token {wrong[0]} died at length {length}, and is dead or shared in this run"
            )

    def misfit(self, key: RequestKey, why: str) -> ConfigError:
        return ConfigError(
            REPLAY, self.path, f"does not fit request {key.nth} of prompt {key.prompt}: {why}"
        )


def _read_lines(path: str) -> list[str]:
    try:
        return read_text(path, REPLAY).splitlines()
    except ConfigError as error:
        allowed = f"a file that {RECORD} wrote ({error.allowed})"
        raise ConfigError(REPLAY, error.value, allowed) from None


def _parse(path: str, number: int, line: str) -> dict:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        entry = None
    if not isinstance(entry, dict):
        raise ConfigError(REPLAY, path, f"line {number} is not a JSON object")
    return entry
