"""Keep the traceback of a failure out of the way, but not out of reach."""

from __future__ import annotations

import os
import sys
import time
import traceback
from pathlib import Path

from vtoken.models.store import cache_dir


def write_crash_log(error: BaseException) -> Path | str:
    """Write a traceback to a new file in the cache's `logs` and return its path."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    path = cache_dir() / "logs" / f"{stamp}-{os.getpid()}.log"
    body = "".join(traceback.format_exception(error))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{' '.join(sys.argv)}\n\n{body}")
    except OSError as problem:
        return f"no log could be written to {path.parent}: {problem.strerror}"
    return path
