"""Makes an engine and runs the jobs that come in on stdin."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path

from . import DONE, FAILED, READY, REFUSED
from .base import Refused
from .openvino import OpenVino, OpenVinoEviction
from .presses import KvPress
from .stock import Stock

ENGINES = {
    "stock": Stock, "openvino": OpenVino, "openvino-eviction": OpenVinoEviction,
    "kvpress": KvPress,
}  # fmt: skip


class Channel:
    """Lines to the other process; whatever else is printed goes to stderr."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def say(self, word: str, body: object = None) -> None:
        self._file.write(f"{word} {json.dumps(body)}\n")
        self._file.flush()


def serve(channel: Channel, name: str, settings: dict) -> None:
    """Make the engine and run jobs until there are no more."""
    clock = time.process_time if settings.pop("clock", "wall") == "cpu" else time.perf_counter
    engine = ENGINES[name](settings)
    channel.say(READY, engine.about)
    for line in sys.stdin:
        job = json.loads(line)
        start = clock()
        times, values = engine.run(job["requests"], job["concurrency"], clock)
        found = {"times": times, "wall_s": clock() - start, "values": values}
        Path(job["result"]).write_text(json.dumps(found), encoding="utf-8")
        channel.say(DONE)


def main() -> None:
    """Run the engine sys.argv[1] with the settings sys.argv[2]."""
    channel = Channel()
    try:
        serve(channel, sys.argv[1], json.loads(sys.argv[2]))
    except Refused as refused:
        channel.say(REFUSED, refused.answer)
    except Exception as error:  # noqa: BLE001 - whatever it is, the other process must hear it
        traceback.print_exc()
        channel.say(FAILED, f"{type(error).__name__}: {' '.join(str(error).split())}")
    os._exit(0)  # an engine's threads would keep the process from ending
