"""Options of the command line: one table row each, shared by all commands that take them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from vtoken.modes import MODES
from vtoken_cli.parsers import choice, count, flag, integer, json_object, model_length, number, text

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
        """Convert a value that was given."""
        return flag(value, self.name) if self.switch else self.parse(value, self.name)


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
    Opt("max_model_len", parse=model_length, metavar="TOKENS|auto", default="the model's",
        help="Longest sequence; 32K works, auto (or -1) is what memory holds."),
    Opt("max_num_seqs", parse=count, metavar="N", default="vLLM's",
        help="Most requests in one step."),
    Opt("dtype", metavar="TYPE", default="vLLM's", help="float32, bfloat16, float16 or auto."),
    Opt("tensor_parallel_size", "--tensor-parallel-size -tp", parse=count, metavar="N",
        default="1", help="GPUs that share one model."),
)  # fmt: skip
"""Settings of the engine below. Keys are EngineSettings' fields; `--seed` goes to both."""

OUTPUT = (
    Opt("as_json", "--json", switch=True, help="The result as JSON on stdout, nothing else there."),
    Opt("quiet", switch=True, help="No notes and no progress."),
    Opt("verbose", switch=True, help="Details, and vLLM's own log."),
)
FILES = (
    Opt("config", metavar="FILE.yaml", help="These options from YAML; the command line wins."),
    Opt("output", metavar="DIR", help="Write result.json, tables and plots here."),
)


def shared_rows(**defaults: str) -> list[Opt]:
    """`VTOKEN` and `ENGINE` with what this command's help says about their defaults."""
    return [replace(row, default=defaults.get(row.key, row.default)) for row in (*VTOKEN, *ENGINE)]


def by_key(rows: Sequence[Opt]) -> Mapping[str, Opt]:
    """Index rows by their key."""
    return {row.key: row for row in rows}
