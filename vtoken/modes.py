"""The modes an engine runs in, listed here and nowhere else; importing this costs nothing."""

from __future__ import annotations

from typing import Literal, get_args

Mode = Literal["native", "indirection", "naive", "vtoken"]

MODES: tuple[str, ...] = get_args(Mode)
EVICTING_MODES = ("naive", "vtoken")
