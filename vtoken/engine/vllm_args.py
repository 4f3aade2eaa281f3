"""Read options meant for vLLM with vLLM's own parser."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from vtoken.errors import ConfigError


def parse_vllm_args(args: Sequence[str]) -> dict[str, Any]:
    """Turn command-line options of vLLM into keyword arguments of its EngineArgs.

    Only what is given comes back; vLLM's defaults stay vLLM's business.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ConfigError("--", " ".join(args), f"vLLM says: {message}")

    parser = EngineArgs.add_cli_args(Parser(add_help=False))
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    return vars(parser.parse_args(list(args)))
