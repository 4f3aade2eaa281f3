"""Peers: engines of other environments, whose libraries are stand-ins here."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from peer_fakes import asked, write_openvino

from vtoken.engine.peer_runner.presses import KvPress, same_length_batches
from vtoken.errors import ConfigError, EngineError
from vtoken.experiments.bench.bench_options import Case
from vtoken.experiments.bench.context import SuiteResult
from vtoken.experiments.bench.named_workloads import Workload
from vtoken.experiments.bench.open_engines import Pool
from vtoken.experiments.bench.pairing import Comparison
from vtoken.experiments.bench.suites import peers as suite
from vtoken.experiments.bench.suites.peer_process import Peer, check_interpreter, check_peer_args
from vtoken.workloads import WorkloadRequest


def requests(num: int, prompt_len: int = 40, output_len: int = 5, first: int = 1) -> list:
    ids = [first] * prompt_len
    return [
        WorkloadRequest(
            request_id=str(i), prompt_len=prompt_len, output_len=output_len + i,
            prompt_token_ids=ids,
        )
        for i in range(num)
    ]  # fmt: skip


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A folder with the stand-ins; interpreters that are started find them."""
    folder = tmp_path / "library"
    write_openvino(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    return folder


@pytest.fixture
def settings(tmp_path):
    model = tmp_path / "a-model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return {
        "model": str(model), "cache": str(tmp_path / "cache"), "dtype": "float32",
        "pool_tokens": 1000, "max_num_seqs": 2, "budget_tokens": 200,
    }  # fmt: skip


@pytest.fixture
def start():
    """Starts peers, and ends them."""
    started = []

    def start(name, settings) -> Peer:
        started.append(Peer(name, sys.executable, settings))
        return started[-1]

    yield start
    for peer in started:
        peer.close()
        assert peer.process.returncode is not None


# ---- OpenVINO GenAI ------------------------------------------------------------------------


def test_openvino_runs_a_closed_loop_in_our_pool_and_precision(library, settings, start) -> None:
    peer = start("openvino", settings)
    # The pool in whole blocks of 32.
    assert peer.about == {"version": "openvino-genai 1.2", "pool_tokens": 992}
    found = peer.run(requests(3), 2)
    assert [len(tokens_s) for _, tokens_s in found["times"]] == [5, 6, 7]
    for submitted_s, tokens_s in found["times"]:
        assert [submitted_s, *tokens_s, found["wall_s"]] == sorted(
            [submitted_s, *tokens_s, found["wall_s"]]
        )
    assert found["times"][2][0] > found["times"][0][1][-1]  # had to wait for a place
    assert found["values"] == {"concurrency": 2, "peak_pool_tokens": 496}
    (made,) = asked(library)
    assert made["num_kv_blocks"] == 31 and made["max_num_seqs"] == 2 and made["dynamic_split_fuse"]
    assert made["enable_prefix_caching"] is False and "use_cache_eviction" not in made
    assert made["properties"] == {
        "INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "INFERENCE_NUM_THREADS": 3,
    }  # fmt: skip


def test_openvino_evicts_to_the_budget_in_whole_blocks(library, settings, start) -> None:
    peer = start("openvino-eviction:sum", settings | {"aggregation": "SUM"})
    assert peer.about["budget_tokens"] == 192 and peer.about["eviction"].startswith("SUM")
    (made,) = asked(library)
    assert made["use_cache_eviction"] and made["cache_eviction_config"] == [32, 96, 192, "sum"]


def test_a_model_is_exported_once_and_again_when_it_changes(
    library, settings, start, tmp_path
) -> None:
    for _ in range(2):
        start("openvino", settings)
    exports = library / "exports"
    assert exports.read_text().count("\n") == 1
    assert (
        exports.read_text().startswith("1export openvino --model") and "fp32" in exports.read_text()
    )
    first, second = asked(library)
    assert first["folder"] == second["folder"]
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [first["folder"].split("/")[-1]]
    (tmp_path / "a-model" / "config.json").write_text('{"other": 1}')
    start("openvino", settings)
    assert exports.read_text().count("\n") == 2 and asked(library)[2]["folder"] != first["folder"]


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("openvino", {"device": "TPU"}, ["--peer-args openvino.device 'TPU'", "one of CPU, GPU"]),
        ("openvino", {"ir": "/no/ir"}, ["--peer-args openvino.ir '/no/ir'", "openvino_model.xml"]),
        ("openvino", {"model": "unknown"}, ["--model 'unknown'", "KeyError: no such architecture"]),
        (
            "openvino-eviction", {"aggregation": "MAX"},
            ["--peer-args openvino-eviction.aggregation 'MAX'", "one of SUM, NORM_SUM"],
        ),
        ("openvino-eviction", {"recent_size": 40}, ["recent_size '40'", "a multiple of 32"]),
        ("openvino-eviction", {"budget_tokens": 90}, ["--kv-budget-tokens '90'", "at least 96"]),
    ],
)  # fmt: skip
def test_refusals_name_the_option_and_what_is_allowed(
    name, changes, says, library, settings, start
) -> None:
    with pytest.raises(ConfigError) as refused:
        start(name, settings | changes)
    for text in says:
        assert text in str(refused.value)


def test_an_environment_that_cannot_export_is_refused(tmp_path, library, settings, start) -> None:
    other = tmp_path / "other"
    write_openvino(other, has_optimum=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(other))
        with pytest.raises(ConfigError, match=r"also has optimum-intel.*\"ir\": \"FOLDER\""):
            start("openvino", settings)
    (other / "openvino_model.xml").write_text("<net/>")
    start("openvino", settings | {"ir": str(other)})


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"first": 99}, "openvino failed: ValueError: the first token is 99"),
        ({"prompt_len": 501}, "does not fit 992 slots"),
        ({"first": 9}, "the peer openvino ended by signal 9"),
    ],
)
def test_a_failure_is_one_sentence(bad, says, library, settings, start) -> None:
    peer = start("openvino", settings)
    with pytest.raises(EngineError) as failed:
        peer.run(requests(1, **bad), 1)
    assert says in str(failed.value) and "\n" not in str(failed.value)


# ---- names ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"kvpres": {}}, ["--peer-args 'kvpres'", "did you mean 'kvpress'?"]),
        ({"kvpress": {"pres": "X"}}, ["--peer-args 'kvpress.pres'", "did you mean 'press'?"]),
        ({"kvpress": "SnapKVPress"}, ["an object of settings"]),
        ({"openvino": {"press": "X"}}, ["'openvino.press'", "one of", "device"]),
    ],
)
def test_peer_args_are_for_a_peer_and_known(args, says) -> None:
    with pytest.raises(ConfigError) as refused:
        check_peer_args({"stock": "", "kvpress": "", "openvino": ""}, args)
    for text in says:
        assert text in str(refused.value)
    check_peer_args({"stock": ""}, {"stock": {"any": "argument of vLLM"}})


def test_a_label_is_a_second_line_of_the_same_engine(library) -> None:
    check_interpreter("openvino:again", sys.executable)
    with pytest.raises(ConfigError, match="--peers 'openvin:again': did you mean 'openvino'"):
        check_interpreter("openvin:again", sys.executable)


# ---- rows ----------------------------------------------------------------------------------


def test_rows_say_pool_budget_concurrency_and_version(library, settings, start) -> None:
    names = {"stock": "openvino", "openvino": "openvino", "openvino-eviction": "openvino-eviction"}
    peers = {name: start(kind, settings) for name, kind in names.items()}
    for name, peer in peers.items():
        peer.name = name
    done = []
    runner = SimpleNamespace(
        run=lambda turn: {},
        raise_if_interrupted=lambda: None,
        note_done=lambda n, t: done.append(n),
    )
    context = SimpleNamespace(
        journal=SimpleNamespace(get=lambda key: None, put=lambda key, record: None),
        settings=SimpleNamespace(goodput_ms={}, peer_args={}),
    )
    comparison = Comparison(
        suite="peers", workload=Workload(name="w", make=lambda n, r: requests(n), max_tokens=48),
        pool=Pool(num_kv_blocks=60, block_size=16), cases=[], num_requests=3, max_concurrency=2,
        repeats=2,
    )  # fmt: skip
    result = SuiteResult()
    suite._compare(context, result, runner, comparison, peers)
    rows = {row["mode"]: row for row in result.rows}
    assert list(rows) == list(names) and len(done) == 6
    for name, row in rows.items():
        assert row["peer_version"] == "openvino-genai 1.2" and row["engine"] == name
        assert (row["concurrency"], row["pool_tokens"], row["repeats"]) == (2, 992, 2)
        assert row["completed"] == 3 and row["total_output_tokens"] == 18
        assert (row.get("throughput_over_stock") is None) == (name == "stock")
    evicting = rows["openvino-eviction"]
    assert evicting["budget_tokens"] == 192 and "budget_tokens" not in rows["openvino"]
    assert "evicted nothing" in evicting["note"] and "note" not in rows["openvino"]
    assert "evicted nothing" in suite.sentences([evicting])[0]


def test_turns_that_were_complete_are_rows_after_ctrl_c() -> None:
    names = ["stock", "openvino"]
    asked = []

    def run(requests, concurrency):
        asked.append(concurrency)
        if len(asked) == len(names) + 4:  # after the warm-ups: openvino's second turn
            raise KeyboardInterrupt
        times = [(0.0, [1.0, 2.0])] * len(requests)
        return {"times": times, "wall_s": 2.0, "values": {}}

    peers = {n: SimpleNamespace(name=n, about={"version": "1"}, run=run) for n in names}
    context = SimpleNamespace(
        journal=SimpleNamespace(get=lambda key: None, put=lambda key, record: None),
        settings=SimpleNamespace(goodput_ms={}, peer_args={}),
    )
    runner = SimpleNamespace(
        run=lambda turn: {}, raise_if_interrupted=lambda: None, note_done=lambda n, t: None
    )
    comparison = Comparison(
        suite="peers", workload=Workload(name="w", make=lambda n, r: requests(n), max_tokens=48),
        pool=Pool(num_kv_blocks=60, block_size=16), cases=[Case(mode="native")], num_requests=3,
        max_concurrency=2, repeats=2,
    )  # fmt: skip
    result = SuiteResult()
    with pytest.raises(KeyboardInterrupt):
        suite._compare(context, result, runner, comparison, peers)
    assert {row["mode"]: row["repeats"] for row in result.rows} == {"stock": 2, "openvino": 1}
    assert result.rows[1]["throughput_over_stock"] == 1.0


# ---- kvpress -------------------------------------------------------------------------------


def test_batches_are_consecutive_prompts_of_one_length() -> None:
    items = [([0] * n, 1) for n in (3, 3, 3, 4, 3)]
    sizes = [[len(ids) for ids, _ in batch] for batch in same_length_batches(items, 2)]
    assert sizes == [[3, 3], [3], [4], [3]]


@pytest.fixture
def kvpress(monkeypatch):
    """A kvpress whose presses keep the first tokens, and the positions that the model was given."""
    import contextlib
    from dataclasses import dataclass

    import torch
    import transformers

    calls = []

    class Model:
        device, press = "cpu", None

        def eval(self):
            return self

        def __call__(self, input_ids, past_key_values, position_ids=None, **kwargs):
            batch, length = input_ids.shape
            calls.append(None if position_ids is None else position_ids.tolist())
            keys = torch.zeros(batch, 1, length, 2)
            past_key_values.update(keys, keys, 0)
            if self.press is not None:
                layer, ratio = past_key_values.layers[0], self.press.compression_ratio
                num_kept = int(layer.keys.shape[2] * (1 - ratio))
                layer.keys, layer.values = (
                    layer.keys[:, :, :num_kept],
                    layer.values[:, :, :num_kept],
                )
            return SimpleNamespace(logits=torch.zeros(batch, 1, 8))

    @dataclass
    class FirstPress:
        compression_ratio: float = 0.0

        @contextlib.contextmanager
        def __call__(self, model):
            model.press = self
            yield
            model.press = None

    @dataclass
    class WrapperPress:
        press: object
        compression_ratio: float = 0.0

    module = SimpleNamespace(FirstPress=FirstPress, WrapperPress=WrapperPress)
    monkeypatch.setitem(sys.modules, "kvpress", module)
    monkeypatch.setattr("vtoken.engine.peer_runner.presses._version", lambda name: f"{name} 0")
    model = SimpleNamespace(from_pretrained=lambda *args, **kwargs: Model())
    monkeypatch.setattr(transformers, "AutoModelForCausalLM", model)
    return calls


KVPRESS = {"model": "m", "dtype": "float32", "press": "FirstPress", "peer": "kvpress"}


@pytest.mark.parametrize(
    ("budget", "kept"),
    [({"budget_tokens": 33}, 33), ({"budget_tokens": 30, "eviction_ratio": 0.5}, 20)],
)
def test_kvpress_compresses_prompts_and_positions_go_on(kvpress, budget, kept) -> None:
    engine = KvPress(KVPRESS | budget)
    assert engine.about["budget_tokens"] == budget["budget_tokens"]
    ticks = iter(range(10_000))
    jobs = [([1] * 40, num) for num in (3, 5, 4)]
    times, values = engine.run(jobs, 2, lambda: next(ticks))
    assert [len(tokens_s) for _, tokens_s in times] == [3, 5, 4]
    assert times[2][0] > times[1][1][-1]  # the second batch waits for the first's longest
    assert kvpress == [
        None,
        *([[p], [p]] for p in range(40, 44)),
        None,
        *([[p]] for p in (40, 41, 42)),
    ]
    # 40 tokens and 4 (3 of the second batch) were computed; the prompts' were cut to `kept`.
    assert values["concurrency"] == 2 and values["evicted_tokens"] == 3 * (40 - kept)
    assert values["peak_pool_tokens"] == 2 * (kept + 4)


def test_a_wrong_press_names_those_that_there_are(kvpress) -> None:
    from vtoken.engine.peer_runner.base import Refused

    with pytest.raises(Refused, match="kvpress.press WrapperPress: one of FirstPress$"):
        KvPress(KVPRESS | {"press": "WrapperPress", "budget_tokens": 9})


def test_stock_vllm_gets_its_own_arguments_and_no_others(monkeypatch, settings):
    arguments = pytest.importorskip("vllm.engine.arg_utils")
    from vllm.v1.engine.llm_engine import LLMEngine

    from vtoken.engine.peer_runner.stock import Stock

    made = []
    monkeypatch.setattr(LLMEngine, "from_engine_args", lambda args: made.append(args))
    for name in ("VLLM_PLUGINS", "VLLM_CPU_OMP_THREADS_BIND"):
        monkeypatch.setenv(name, "")
    own = {"model": settings["model"], "block_size": 32, "num_gpu_blocks_override": 9}
    stock = Stock({**own, "peer": "stock"})
    assert isinstance(made[0], arguments.EngineArgs) and made[0].block_size == 32
    assert stock.about["pool_tokens"] == 8 * 32


@pytest.mark.parametrize(("given", "taken"), [((512, 16), (256, 32)), ((9, 48), (5, 96)),
                                              ((8, 64), (8, 64)), ((3, 16), (2, 32))])  # fmt: skip
def test_stock_vllm_gets_the_same_memory_in_blocks_that_it_takes_on_a_cpu(given, taken):
    pool = suite.stock_cpu_pool(Pool(num_kv_blocks=given[0], block_size=given[1]))
    assert (pool.num_kv_blocks, pool.block_size) == taken
    more = pool.num_kv_blocks * pool.block_size - given[0] * given[1]
    assert 0 <= more < pool.block_size
