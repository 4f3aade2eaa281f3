"""Score traces: the reports of a run by prompt and logical length, written and read again.

With one (`--record-scores`) a dry run, which has no attention, can evict what the real one did.
"""

from __future__ import annotations

import base64
import json
import zlib
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from vtoken.errors import ConfigError
from vtoken.policies.base import ScoreKind
from vtoken.recording.decisions import RequestKey, prompt_hash
from vtoken.recording.line_file import LineFile
from vtoken.units import read_text

SCHEMA = "vtoken-scores/1"
RECORD = "--record-scores"


class ScoreRecorder(LineFile):
    """Writes reports to a file, one JSON line each.

    A line has the request's key, the logical length after the step that made the scores, and two
    packed arrays by ascending id: the steps from id to id (int32, deflated) and the scores
    (float32, exact): about six bytes a live token.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: str, header: dict) -> None:
        super().__init__(RECORD, path, {**header, "schema": SCHEMA})

    def add(
        self, key: RequestKey, num_preemptions: int, ids: np.ndarray, scores: np.ndarray
    ) -> None:
        """Take one request's report.

        Args:
            ids: int32[n], the logical id at each physical index, -1 for a hole.
            scores: float32[n].
        """
        live = np.flatnonzero(ids >= 0)
        live = live[np.argsort(ids[live])]
        ids = ids[live]
        line = {
            **key._asdict(),
            "preemptions": num_preemptions,
            "length": int(ids[-1]) + 1,  # the newest token is live in its own step
            "id_steps": _pack(np.diff(ids, prepend=np.int32(-1)).astype(np.int32), deflate=True),
            "scores": _pack(scores[live].astype(np.float32)),
        }
        self.append(line)


class ScoreTrace:
    """Recorded reports as the `score_source` of a dry engine.

    A request is known by its prompt. It gets the scores recorded at its length; where the dry run
    asks at other lengths than the real one did, those of the last length before, or else of the
    first one. Ids that the record does not know get NaN: they are not evictable yet.
    """

    def __init__(self, path: str, kind: ScoreKind | None = None) -> None:
        """Read a file.

        Args:
            kind: what the policy reads.

        Raises:
            ConfigError: no such file, not of this schema, damaged, or of another score kind.
        """
        self.path = path
        self._prompt_of = None
        self._hashes: dict[str, str] = {}
        self._lines: dict[str, dict[int, dict]] = {}
        try:
            lines = read_text(path, "score trace").splitlines()
            self.header = json.loads(lines[0]) if lines else {}
            if not isinstance(self.header, dict) or self.header.get("schema") != SCHEMA:
                raise ConfigError("score trace", path, f"a file that {RECORD} wrote, of {SCHEMA}")
            for line in lines[1:]:
                entry = json.loads(line)
                by_length = self._lines.setdefault(entry["prompt"], {})
                by_length.setdefault(int(entry["length"]), entry)
        except ConfigError:
            raise
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(
                "score trace", path, f"a file that {RECORD} wrote ({error})"
            ) from None
        self._lengths = {prompt: sorted(v) for prompt, v in self._lines.items()}
        if kind is not None and self.header["score_kind"] != kind.value:
            raise ConfigError(
                "score trace", path,
                f"holds {self.header['score_kind']} scores, the policy reads {kind.value}",
            )  # fmt: skip

    def prompts(self) -> list[str]:
        """Hashes of the recorded prompts, in the order in which they were first met."""
        return list(self._lines)

    def lengths(self, prompt: str) -> Sequence[int]:
        """Logical lengths, ascending, at which scores of this prompt (a hash) were recorded."""
        return self._lengths.get(prompt, ())

    def bind(self, prompt_of) -> None:
        """Learn how to find a request's prompt: `prompt_of(req_id) -> token ids`."""
        self._prompt_of = prompt_of

    def __call__(self, req_id: str, step_seq: int, ids: np.ndarray) -> np.ndarray:
        """float32[n], a score for each id; the shape of `DryEngine`'s score_source.

        Raises:
            ConfigError: nothing was recorded of this prompt.
        """
        if req_id not in self._hashes:
            self._hashes[req_id] = prompt_hash(self._prompt_of(req_id))
        return self.scores(self._hashes[req_id], int(ids.max()) + 1, ids)

    def scores(self, prompt: str, length: int, ids: np.ndarray) -> np.ndarray:
        """float32[n], the scores of these ids at a logical length; 0 for a hole (-1)."""
        lengths = self.lengths(prompt)
        if not lengths:
            raise ConfigError(
                "score trace", self.path, f"has no scores of a request with prompt {prompt}"
            )
        entry = self._lines[prompt][lengths[max(0, bisect_right(lengths, length) - 1)]]
        known = np.cumsum(_unpack(entry["id_steps"], np.int32, deflated=True)) - 1
        table = np.full(max(length, int(known[-1]) + 1), np.nan, np.float32)
        table[known] = _unpack(entry["scores"], np.float32)
        return np.where(ids >= 0, table[ids], np.float32(0.0))


def _pack(array: np.ndarray, deflate: bool = False) -> str:
    raw = array.tobytes()
    return base64.b64encode(zlib.compress(raw, 1) if deflate else raw).decode("ascii")


def _unpack(text: str, dtype, deflated: bool = False) -> np.ndarray:
    raw = base64.b64decode(text)
    return np.frombuffer(zlib.decompress(raw) if deflated else raw, dtype)
