"""Prepare embedded models: `python -m vtoken.models [NAME ...]`."""

from __future__ import annotations

import sys

from vtoken.models import MODEL_NAMES, prepare

for _name in sys.argv[1:] or MODEL_NAMES:
    print(prepare(_name, progress=lambda line: print(line, file=sys.stderr)))
