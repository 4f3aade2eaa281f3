"""Options reach a command converted, only when given, from the command line or YAML."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from vtoken.config import VTokenConfig
from vtoken.engine.settings import EngineSettings
from vtoken.errors import ConfigError
from vtoken_cli.command import command
from vtoken_cli.given import Run
from vtoken_cli.options import ENGINE, VTOKEN, Opt
from vtoken_cli.parsers import count, duration_s

OWN = (
    Opt("model_name", positional=True),
    Opt("prompt_len", parse=count),
    Opt("time_limit_s", "--time-limit", parse=duration_s),
    Opt("dry_run", switch=True),
)


def parse(*args: str, many: tuple[str, ...] = (), extra: tuple[str, ...] = ()) -> Run:
    """Run a command that takes every option, and return what it received."""
    received: list[Run] = []

    @command(*OWN, *VTOKEN, *ENGINE, many=many)
    def sample(run: Run) -> None:
        """Sample."""
        received.append(run)

    app = typer.Typer(rich_markup_mode=None)
    app.command()(sample)
    typer.main.get_command(app)(list(args), standalone_mode=False, obj=list(extra))
    return received[0]


def test_nothing_given_is_nothing():
    run = parse()
    assert (run.vtoken, run.engine, run.own, run.many) == ({}, {}, {}, {})
    assert run.output_dir is None and run.extra_args == []
    assert (run.out.as_json, run.out.quiet, run.out.verbose) == (False, False, False)


def test_keys_are_those_of_the_settings():
    """So that commands can hand them on as they are."""
    assert {row.key for row in VTOKEN} - {"hash_kv"} <= set(VTokenConfig.model_fields)
    assert {row.key for row in ENGINE} <= set(EngineSettings.__dataclass_fields__)


VALUES = [
    ("vtoken", "--mode", "naive", "mode", "naive"),
    ("vtoken", "--policy", "random", "policy", "random"),
    ("vtoken", "--policy-args", '{"history": 3}', "policy_args", {"history": 3}),
    ("vtoken", "--eviction-ratio", "0.25", "eviction_ratio", 0.25),
    ("vtoken", "--kv-budget-tokens", "1K", "kv_budget_tokens", 1024),
    ("vtoken", "--sink-tokens", "0", "sink_tokens", 0),
    ("vtoken", "--recent-tokens", "7", "recent_tokens", 7),
    ("vtoken", "--eviction-interval", "16", "eviction_interval_tokens", 16),
    ("vtoken", "--score-queries", "all", "score_queries", "all"),
    ("vtoken", "--score-queries", "8", "score_queries", 8),
    ("vtoken", "--shared-prefix", "copy", "shared_prefix", "copy"),
    ("vtoken", "--replay-decisions", "f", "replay_decisions", "f"),
    ("vtoken", "--record-decisions", "f", "record_decisions", "f"),
    ("vtoken", "--record-scores", "f", "record_scores", "f"),
    ("vtoken", "--max-moves-per-step", "9", "max_moves_per_step", 9),
    ("vtoken", "--fragmentation-threshold", "0.1", "fragmentation_threshold", 0.1),
    ("vtoken", "--evict-when", "pressure", "evict_when", "pressure"),
    ("vtoken", "--low-watermark", "0.1", "low_watermark_frac", 0.1),
    ("vtoken", "--relocation", "inline", "relocation", "inline"),
    ("vtoken", "--hash-kv-every", "5", "hash_kv_every", 5),
    ("vtoken", "--seed", "3", "seed", 3),
    ("engine", "--seed", "3", "seed", 3),
    ("engine", "--model", "tiny-llama", "model", "tiny-llama"),
    ("engine", "--gpu-mem-util", "0.35", "gpu_memory_utilization", 0.35),
    ("engine", "--gpu-memory-utilization", "0.35", "gpu_memory_utilization", 0.35),
    ("engine", "--kv-cache-memory-bytes", "1G", "kv_cache_memory_bytes", 2**30),
    ("engine", "--num-kv-blocks", "208", "num_kv_blocks", 208),
    ("engine", "--block-size", "32", "block_size", 32),
    ("engine", "--max-model-len", "32K", "max_model_len", 32768),
    ("engine", "--max-num-seqs", "4", "max_num_seqs", 4),
    ("engine", "--dtype", "float32", "dtype", "float32"),
    ("engine", "--tensor-parallel-size", "2", "tensor_parallel_size", 2),
    ("engine", "-tp", "2", "tensor_parallel_size", 2),
    ("own", "--prompt-len", "4k", "prompt_len", 4000),
    ("own", "--time-limit", "5m", "time_limit_s", 300.0),
]


@pytest.mark.parametrize(("part", "option", "text", "key", "value"), VALUES)
def test_each_option_arrives_converted(part, option, text, key, value):
    run = parse(option, text)
    found = getattr(run, part)
    assert found == {key: value} and type(found[key]) is type(value)


def test_every_shared_option_is_tried_above():
    tried = {key for part, _, _, key, _ in VALUES if part != "own"}
    assert tried == {row.key for row in (*VTOKEN, *ENGINE)} - {"hash_kv"}


def test_switches_and_positionals():
    run = parse("some-model", "--dry-run", "--json", "--quiet", "--verbose", "--output", "d")
    assert run.own == {"model_name": "some-model", "dry_run": True}
    assert run.out.as_json and run.out.quiet and run.out.verbose
    assert str(run.output_dir) == "d"


def test_hash_kv_is_every_event():
    assert parse("--hash-kv").vtoken == {"hash_kv_every": 1}
    assert parse("--hash-kv", "--hash-kv-every", "4").vtoken == {"hash_kv_every": 4}


def test_comma_lists_where_runs_are_compared():
    run = parse("--mode", "native, vtoken", "--policy", "random", many=("mode", "policy"))
    assert run.many == {"mode": ["native", "vtoken"], "policy": ["random"]} and run.vtoken == {}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--mode", "vtokn"], "--mode 'vtokn': did you mean 'vtoken'?"),
        (["--mode", "native,vtoken"], "--mode 'native,vtoken': did you mean 'vtoken'?"),
        (["--eviction-ratio", "half"], "--eviction-ratio 'half': a number such as 0.5"),
        (["--eviction-ratio", "nan"], "--eviction-ratio 'nan': a number such as 0.5"),
        (["--kv-budget-tokens", "-5"], "--kv-budget-tokens '-5': a whole number"),
        (["--max-model-len", "1.5"], "--max-model-len '1.5': a whole number"),
        (["--eviction-interval", "x"], "--eviction-interval 'x': a whole number"),
        (["--shared-prefix", "share"], "--shared-prefix 'share': one of protect, copy"),
        (["--policy-args", "[1]"], "--policy-args '[1]': a JSON object"),
        (["--time-limit", "soon"], "--time-limit 'soon': a duration such as"),
        (["--seed", "1.5"], "--seed '1.5': a whole number"),
        (["--gpu-mem-util", ""], "--gpu-mem-util '': a number such as 0.5"),
    ],
)
def test_wrong_values_name_option_value_and_what_is_allowed(args, message):
    with pytest.raises(ConfigError) as caught:
        parse(*args)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("text", ["native,,vtoken", "", "vtoken,vtoken", "native,vtokn"])
def test_wrong_lists(text):
    with pytest.raises(ConfigError, match="--mode"):
        parse("--mode", text, many=("mode",))


@pytest.fixture
def yaml_file(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "settings.yaml"
        path.write_text(text)
        return str(path)

    return write


def parse_yaml(yaml_file: Any, text: str, *args: str, **kwargs: Any) -> Run:
    return parse("--config", yaml_file(text), *args, **kwargs)


def test_yaml_gives_the_same_options(yaml_file):
    run = parse_yaml(
        yaml_file,
        """
        mode: [native, vtoken]
        eviction-ratio: 0.25
        eviction_interval: 16     # underscores do as well
        recent_tokens: null       # not given
        policy-args: {history: 3}
        model: tiny-llama
        gpu-mem-util: 0.5
        max-model-len: 32K
        prompt-len: 256
        dry-run: true
        hash-kv: false
        json: true
        output: results
        """,
        many=("mode",),
    )
    assert run.vtoken == {
        "eviction_ratio": 0.25,
        "eviction_interval_tokens": 16,
        "policy_args": {"history": 3},
    }
    assert run.engine == {
        "model": "tiny-llama",
        "gpu_memory_utilization": 0.5,
        "max_model_len": 32768,
    }
    assert run.own == {"prompt_len": 256, "dry_run": True}
    assert run.many == {"mode": ["native", "vtoken"]}
    assert run.out.as_json and str(run.output_dir) == "results"


def test_the_command_line_wins_over_yaml(yaml_file):
    run = parse_yaml(yaml_file, "sink-tokens: 4\nseed: 1", "--sink-tokens", "0")
    assert run.vtoken == {"sink_tokens": 0, "seed": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("eviction-ration: 0.5", "'eviction-ration': unknown key; did you mean 'eviction-ratio'?"),
        ("config: other.yaml", "'config': unknown key"),
        ("eviction-ratio: [1]", "--eviction-ratio [1]: a number"),
        ("eviction-ratio: yes", "--eviction-ratio True: a number"),
        ("dry-run: 1", "--dry-run 1: true or false"),
        ("policy: {a: 1}", "--policy {'a': 1}: a single value"),
        ("sink-tokens: 1.5", "--sink-tokens 1.5: a whole number"),
        ("eviction-interval: 1\neviction_interval_tokens: 2", "--eviction-interval is there twice"),
        ("- a\n- b", "must hold one mapping"),
        ("", "must hold one mapping"),
        ("a: [", "is not YAML"),
        ("[" * 3000, "is not YAML: maximum recursion depth"),
        ("seed: " + "9" * 5000, "is not YAML: Exceeds the limit"),
        ("sink-tokens: " + "9" * 100, ": a whole number"),
        ("policy-args: '" + "[" * 100_000 + "'", ": a JSON object"),
        ("a: \0", "is not YAML"),
    ],
)
def test_wrong_yaml(yaml_file, text, message):
    with pytest.raises(ConfigError) as caught:
        parse_yaml(yaml_file, text)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_yaml_file():
    with pytest.raises(
        ConfigError, match="--config '/no/such.yaml': a readable file .No such file or directory"
    ):
        parse("--config", "/no/such.yaml")


@pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
def test_yaml_in_another_encoding(tmp_path, encoding):
    file = tmp_path / "settings.yaml"
    file.write_bytes("seed: 1\nmodel: caf\u00e9\n".encode(encoding))
    with pytest.raises(
        ConfigError, match=r"--config .*settings.yaml:\d': UTF-8 text, but this line"
    ):
        parse("--config", str(file))
    file.write_bytes("model: caf\u00e9".encode("utf-8-sig"))
    assert parse("--config", str(file)).engine["model"] == "caf\u00e9"


@pytest.mark.parametrize("number", ["9" * 400, "9223372036854775808", "9007199254740993.5", "1e5"])
def test_counts_that_no_engine_can_hold(number):
    with pytest.raises(ConfigError, match=f"--sink-tokens '{number}': a whole number"):
        parse("--sink-tokens", number)


@pytest.mark.parametrize("spelling", ["auto", "-1"])
def test_a_length_that_memory_decides(spelling, yaml_file):
    run = parse("--max-model-len", spelling)
    assert run.engine == {"max_model_len": -1}
    assert EngineSettings(**run.engine).max_model_len == -1
    assert run.settings()["engine"].max_model_len is None  # scans know what their prompts need
    assert parse_yaml(yaml_file, f"max-model-len: {spelling}").engine == {"max_model_len": -1}
    for wrong in ("-2", "0.5", "car"):
        with pytest.raises(ConfigError, match=f"--max-model-len '{wrong}': a whole number"):
            parse("--max-model-len", wrong)
    with pytest.raises(ConfigError, match="--max-num-seqs -1"):
        EngineSettings(max_num_seqs=-1)


def test_counts_are_exact():
    assert (
        parse("--seed", "1", "--sink-tokens", "9007199254740993").vtoken["sink_tokens"] == 2**53 + 1
    )


@pytest.mark.parametrize("duration", ["9" * 400, "1e3", -5, float("inf"), float("nan")])
def test_durations_that_no_clock_can_hold(duration):
    with pytest.raises(ConfigError, match="--interval .*: a duration such as"):
        duration_s(duration, "--interval")


def test_options_for_vllm_need_a_command_that_starts_an_engine():
    with pytest.raises(ConfigError, match="passes no options to vLLM"):
        parse(extra=("--enforce-eager",))


@pytest.mark.vllm
def test_options_for_vllm_are_read_by_vllm():
    run = Run(out=None, extra_args=["--enforce-eager", "--max-num-batched-tokens", "2K",
                                    "--compilation-config.mode", "0"])  # fmt: skip
    args = run.vllm_args()
    assert args["enforce_eager"] is True and args["max_num_batched_tokens"] == 2048
    assert set(args) == {"enforce_eager", "max_num_batched_tokens", "compilation_config"}
    assert Run(out=None).vllm_args() == {}


@pytest.mark.vllm
def test_vllm_refuses_what_it_does_not_know():
    with pytest.raises(ConfigError, match="vLLM says: .*--enforce-eagle"):
        Run(out=None, extra_args=["--enforce-eagle"]).vllm_args()
