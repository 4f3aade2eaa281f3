"""Options of the command line: one table row each, shared by all commands that take them.

A command names the rows it takes and receives what the user gave, converted and checked, with
nothing filled in; defaults are decided where the settings are used.

    @command(*VTOKEN, *ENGINE, Opt("prompt_len", parse=count, metavar="TOKENS", help="..."),
             many=("mode", "policy"), starts_engine=True)
    def capacity_scan(run: Run) -> None:
        '''What the command does: its help text.'''
        run.vtoken       # {"eviction_ratio": 0.5}: keys are VTokenConfig's fields
        run.engine       # {"model": "tiny-llama"}: keys are EngineSettings' fields
        run.own          # {"prompt_len": 256}: rows that are in neither table
        run.many         # {"mode": ["native", "vtoken"]}: comma lists
        run.out          # Output: results, notes, progress
        run.output_dir   # --output
        run.vllm_args()  # options after `--`, as keyword arguments of vLLM's EngineArgs

`command` makes a function that Typer takes as it is. Every command also has `--json`, `--quiet`
and `--verbose`, and where `config=True` (the default) `--config` and `--output`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from vtoken_cli.output import Output
from vtoken_cli.parsers import choice, count, flag, integer, json_object, number, text

Parser = Callable[[Any, str], Any]


@dataclass(frozen=True)
class Opt:
    """One option or positional argument.

    Attributes:
        key: its name in the code and, with dashes, on the command line.
        spellings: other spellings on the command line, separated by spaces; they replace `--key`.
        parse: turns text, or a YAML value, into the value; raises ConfigError.
        default: what the help says when nothing is given; the command decides the value.
        switch: an option without a value.
        positional: an argument, not an option.
    """

    key: str
    spellings: str = ""
    _: KW_ONLY
    parse: Parser = text
    metavar: str = "TEXT"
    help: str = ""
    default: str = ""
    switch: bool = False
    positional: bool = False

    @property
    def flags(self) -> list[str]:
        return self.spellings.split() or ["--" + self.key.replace("_", "-")]

    @property
    def name(self) -> str:
        """How messages name it."""
        return self.key.upper() if self.positional else self.flags[0]

    @property
    def yaml_keys(self) -> set[str]:
        """Keys that mean it in a `--config` file, with underscores."""
        long = {f.lstrip("-").replace("-", "_") for f in self.flags if f.startswith("--")}
        return long | {self.key}

    def read(self, value: Any) -> Any:
        """Convert a value that was given.

        Raises:
            ConfigError: names the option, the value and what is allowed.
        """
        return flag(value, self.name) if self.switch else self.parse(value, self.name)


MODES = ("native", "indirection", "naive", "vtoken")

VTOKEN = (
    Opt("mode", metavar="MODE", help=f"One of {', '.join(MODES)}.", default="vtoken"),
    Opt("policy", metavar="NAME", help="A registered eviction policy.", default="h2o"),
    Opt("policy_args", parse=json_object, metavar="JSON", help="The policy's own parameters."),
    Opt("eviction_ratio", parse=number, metavar="FRACTION", default="0.5",
        help="Fraction of a request's tokens that is dropped."),
    Opt("kv_budget_tokens", parse=count, metavar="TOKENS",
        help="Live tokens kept per request, instead of a ratio."),
    Opt("sink_tokens", parse=count, metavar="TOKENS", default="the policy's, usually 4",
        help="First tokens that are never dropped."),
    Opt("recent_tokens", parse=count, metavar="TOKENS", default="the policy's",
        help="Last tokens that are never dropped."),
    Opt("eviction_interval_tokens", "--eviction-interval", parse=count, metavar="TOKENS",
        default="one block", help="Tokens above the budget at which eviction happens."),
    Opt("score_queries", parse=lambda v, o: v if v == "all" else count(v, o), metavar="N|all",
        default="32", help="Prompt queries that count for scores: the last N of every chunk."),
    Opt("shared_prefix", parse=choice("protect", "copy"), metavar="protect|copy",
        default="protect", help="What happens to tokens in blocks that requests share."),
    Opt("record_decisions", metavar="FILE", help="Write which tokens died when."),
    Opt("replay_decisions", metavar="FILE", help="Evict exactly what an earlier run evicted."),
    Opt("record_scores", metavar="FILE",
        help="Write the attention scores that evictions go by, for dry runs."),
    Opt("max_moves_per_step", parse=count, metavar="N", default="no limit",
        help="Most tokens relocated in one step."),
    Opt("fragmentation_threshold", parse=number, metavar="FRACTION", default="0: always packed",
        help="Hole fraction at which a request is compacted."),
    Opt("evict_when", parse=choice("always", "pressure"), metavar="always|pressure",
        default="always", help="Drop tokens always, or only while the pool runs short."),
    Opt("low_watermark_frac", "--low-watermark", parse=number, metavar="SHARE", default="0.02",
        help="Share of the pool that is kept free: below it memory counts as short."),
    Opt("relocation", metavar="inline|async|sync", default="inline",
        help="Where copies run: in the same step, on a stream of their own, or forced."),
    Opt("hash_kv", switch=True, help="Check K/V hashes at every relocation."),
    Opt("hash_kv_every", parse=count, metavar="N", help="The same, at every N-th relocation."),
    Opt("seed", parse=integer, metavar="N", default="0", help="Seed of policies and sampling."),
)  # fmt: skip
"""Settings of the token-level cache. Keys are VTokenConfig's fields, `hash_kv` apart."""

ENGINE = (
    Opt("model", metavar="NAME|PATH|ID", default="smollm2-135m",
        help="Embedded model, local folder or Hugging Face id."),
    Opt("gpu_memory_utilization", "--gpu-mem-util --gpu-memory-utilization", parse=number,
        metavar="SHARE", default="vLLM's", help="Share of GPU (on a CPU: host) memory."),
    Opt("kv_cache_memory_bytes", parse=count, metavar="BYTES", help="Size of the KV pool."),
    Opt("num_kv_blocks", parse=count, metavar="BLOCKS", help="Usable blocks of the KV pool."),
    Opt("block_size", parse=count, metavar="TOKENS",
        default="16, or the smallest the backend takes", help="Tokens per KV block."),
    Opt("max_model_len", parse=count, metavar="TOKENS", default="the model's",
        help="Longest sequence; 32K works."),
    Opt("max_num_seqs", parse=count, metavar="N", default="vLLM's",
        help="Most requests in one step."),
    Opt("dtype", metavar="TYPE", default="vLLM's", help="float32, bfloat16, float16 or auto."),
    Opt("tensor_parallel_size", "--tensor-parallel-size -tp", parse=count, metavar="N",
        default="1", help="GPUs that share one model."),
)  # fmt: skip
"""Settings of the engine below. Keys are EngineSettings' fields; `--seed` goes to both."""

_OUTPUT = (
    Opt("as_json", "--json", switch=True, help="The result as JSON on stdout, nothing else there."),
    Opt("quiet", switch=True, help="No notes and no progress."),
    Opt("verbose", switch=True, help="Details, and vLLM's own log."),
)
_FILES = (
    Opt("config", metavar="FILE.yaml", help="These options from YAML; the command line wins."),
    Opt("output", metavar="DIR", help="Write result.json, tables and plots here."),
)


@dataclass
class Run:
    """What a user asked of a command: only what was given, converted. See the module's text."""

    out: Output
    vtoken: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    many: dict[str, list[str]] = field(default_factory=dict)
    output_dir: Path | None = None
    extra_args: list[str] = field(default_factory=list)

    def vllm_args(self) -> dict[str, Any]:
        """Read the options after `--` with vLLM's own parser (imports vLLM).

        Raises:
            ConfigError: vLLM does not know an option or refuses a value.
        """
        from vtoken_cli.vllm_args import parse_vllm_args

        return parse_vllm_args(self.extra_args) if self.extra_args else {}


def command(
    *rows: Opt,
    many: Sequence[str] = (),
    starts_engine: bool = False,
    config: bool = True,
) -> Callable[[Callable[[Run], None]], Callable[..., None]]:
    """Turn a function of a `Run` into one that Typer takes.

    Args:
        rows: the options, shared and own.
        many: keys of options that take a comma list here; they go to `Run.many`.
        starts_engine: prepare the process for an engine, and let options for vLLM follow `--`.
        config: offer `--config` and `--output`.
    """
    rows = (*rows, *(_FILES if config else ()), *_OUTPUT)

    def wrap(function: Callable[[Run], None]) -> Callable[..., None]:
        def typer_function(ctx: typer.Context, **values: Any) -> None:
            from vtoken_cli.invoke import invoke

            invoke(function, rows, values, ctx.obj or [], tuple(many), starts_engine)

        typer_function.__name__ = function.__name__
        typer_function.__module__ = function.__module__
        typer_function.__doc__ = inspect.getdoc(function)
        context = inspect.Parameter("ctx", _KEYWORD, annotation=typer.Context)
        parameters = [context, *(_parameter(row) for row in rows)]
        typer_function.__signature__ = inspect.Signature(parameters)
        typer_function.__annotations__ = {p.name: p.annotation for p in parameters}
        typer_function.rows = rows
        return typer_function

    return wrap


_KEYWORD = inspect.Parameter.KEYWORD_ONLY


def _parameter(row: Opt) -> inspect.Parameter:
    """Declare a row to Typer, which only ever sees text: conversion and messages are ours."""
    shown = f"{row.help} [default: {row.default}]" if row.default else row.help
    if row.positional:
        metavar = row.name if row.metavar == "TEXT" else row.metavar
        declared = typer.Argument(help=shown, show_default=False, metavar=metavar)
    elif row.switch:
        return inspect.Parameter(
            row.key,
            _KEYWORD,
            default=False,
            annotation=Annotated[bool, typer.Option(*row.flags, help=shown, show_default=False)],
        )
    else:
        declared = typer.Option(*row.flags, help=shown, metavar=row.metavar, show_default=False)
    annotation = Annotated[str | None, declared]
    return inspect.Parameter(row.key, _KEYWORD, default=None, annotation=annotation)


def by_key(rows: Sequence[Opt]) -> Mapping[str, Opt]:
    """Index rows by their key."""
    return {row.key: row for row in rows}
