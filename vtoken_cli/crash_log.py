"""Keep the traceback of a failure out of the way, but not out of reach."""

from __future__ import annotations

import os
import re
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from vtoken.errors import ConfigError
from vtoken.models.store import open_cache

# Also what argparse takes for --api-key: --api_key, --api-k.
_SECRET = re.compile(
    r"--?(api|hf.t|[\w-]*(key|token|password|secret|credentials?)(=|$))", re.IGNORECASE
)


def write_crash_log(error: BaseException) -> Path | str:
    """Write a traceback to a new file in the cache's `logs`, for its owner alone to read.

    Returns:
        Its path, or why there is none.
    """
    body = "".join(traceback.format_exception(error))
    for secret in secrets_in(sys.argv):
        body = body.replace(secret, "***")
    command = " ".join(redact(sys.argv))
    try:
        path = open_cache("logs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
        with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            # Arguments and messages may hold bytes that are not text.
            file.write(f"{command}\n\n{body}".encode(errors="backslashreplace"))
    except (OSError, ConfigError) as problem:
        return f"no log could be written: {problem}"
    return path


def redact(arguments: Sequence[str]) -> list[str]:
    """Arguments with *** for the values of options that take keys and passwords."""
    shown, hides, is_value = [], False, False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if argument.startswith("-") and not is_value:
            hides = bool(_SECRET.match(argument))
            shown.append(f"{name}=***" if hides and equals else argument)
            is_value = hides and not equals
        else:  # --api-key takes several
            shown.append("***" if hides else argument)
            is_value = False
    return shown


def secrets_in(arguments: Sequence[str]) -> list[str]:
    """What `redact` hides, as far as it is long enough to be looked for in a text."""
    pairs = zip(arguments, redact(arguments), strict=True)
    found = [given.removeprefix(shown[:-3]) for given, shown in pairs if given != shown]
    return [secret for secret in found if len(secret) > 3]
