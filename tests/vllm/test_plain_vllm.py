"""vLLM as its users start it: `additional_config`, an installed package, and no other flag."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from vtoken.errors import ConfigError
from vtoken.vllm_plugin import plugin
from vtoken.vllm_plugin.support_list import OUR_SCHEDULERS, OUR_WORKERS

pytestmark = pytest.mark.vllm

is_installed = "vtoken" in {e.name for e in entry_points(group="vllm.general_plugins")}

# Run by a fresh interpreter; vLLM starts its engine in a process of its own, by spawn.
SCRIPT = """
import json, sys


def main(model, decisions):
    from vllm import LLM, SamplingParams

    llm = LLM(
        model, dtype="float32", max_model_len=512, enforce_eager=True, block_size=16,
        num_gpu_blocks_override=13, disable_log_stats=True,
        additional_config={"vtoken": {
            "policy": "random", "kv_budget_tokens": 48, "record_decisions": decisions,
        }},
    )
    config = llm.llm_engine.vllm_config
    found = {
        "scheduler": str(config.scheduler_config.scheduler_cls),
        "worker": config.parallel_config.worker_cls,
        "client": type(llm.llm_engine.engine_core).__name__,
        "loaded_by_hand": "vtoken" in sys.modules and "vtoken.engine" in sys.modules,
    }
    prompt = {"prompt_token_ids": [10 + i % 97 for i in range(90)]}
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    found["tokens"] = [len(o.outputs[0].token_ids) for o in llm.generate([prompt] * 2, params)]
    # Without eviction this one needs 19 blocks of the 12 that there are.
    big = SamplingParams(max_tokens=200, ignore_eos=True, extra_args={"vtoken_enabled": 0})
    try:
        llm.generate([prompt], big)
    except ValueError as error:
        found["refused"] = str(error)
    found["after"] = [len(o.outputs[0].token_ids) for o in llm.generate([prompt], params)]
    print("FOUND " + json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
"""


@pytest.mark.skipif(
    not is_installed, reason="vtoken is not installed: no entry point to find it by"
)
@pytest.mark.timeout(900)
def test_the_entry_point_does_it_all_in_spawned_processes(tmp_path, model_path):
    script, decisions = tmp_path / "script.py", tmp_path / "decisions.jsonl"
    script.write_text(SCRIPT)
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    env |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }  # fmt: skip
    done = subprocess.run(  # noqa: PLW1510 - the return code is looked at below
        [sys.executable, str(script), str(model_path("tiny-llama")), str(decisions)],
        env=env, cwd=tmp_path, capture_output=True, text=True, timeout=800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(x for x in done.stdout.splitlines() if x.startswith("FOUND "))
    found = json.loads(line.removeprefix("FOUND "))
    assert found["scheduler"] in OUR_SCHEDULERS.values()
    assert found["worker"] == OUR_WORKERS["cpu"]
    assert found["client"] == "SyncMPClient"  # another process, not this one
    assert found["tokens"] == [60, 60] and found["after"] == [60]
    assert "needs 19 KV blocks" in found["refused"] and "has 12" in found["refused"]
    # Written by the scheduler of that process: evictions happened there.
    assert decisions.stat().st_size > 0


@pytest.fixture
def engine_args(model_path, monkeypatch):
    """Function that finishes a VllmConfig as vLLM does at start-up, without an engine."""
    plugin.register()
    from vllm.engine.arg_utils import EngineArgs

    def finish(settings, **args):
        model = args.pop("model", None) or str(model_path("tiny-llama"))
        additional = {} if settings is None else {"additional_config": {"vtoken": settings}}
        base = {"dtype": "float32", "max_model_len": 256, "block_size": 16, "enforce_eager": True}
        return EngineArgs(model=model, **(base | additional | args)).create_engine_config()

    return finish


class TestClasses:
    def test_set_where_the_user_set_none(self, engine_args):
        config = engine_args({"policy": "random"}, async_scheduling=False)
        assert config.scheduler_config.scheduler_cls == OUR_SCHEDULERS[False]
        assert config.parallel_config.worker_cls == OUR_WORKERS["cpu"]

    def test_async_scheduling_gets_the_async_scheduler(self, engine_args):
        from vtoken.vllm_plugin.plugin import finish_config

        config = engine_args({"policy": "random"})
        config.scheduler_config.scheduler_cls = None
        config.scheduler_config.async_scheduling = True
        finish_config(config)
        assert config.scheduler_config.scheduler_cls == OUR_SCHEDULERS[True]

    @pytest.mark.parametrize("settings", [None, {"mode": "native"}])
    def test_left_alone_without_settings_and_in_native(self, engine_args, settings):
        config = engine_args(settings)
        assert config.scheduler_config.scheduler_cls is None
        assert config.parallel_config.worker_cls.startswith("vllm.")

    @pytest.mark.parametrize(
        ("option", "value"),
        [
            ("scheduler_cls", "vllm.v1.core.sched.scheduler.Scheduler"),
            ("worker_cls", "vllm.v1.worker.cpu_worker.CPUWorker"),
        ],
    )
    def test_a_users_own_is_refused_beside_ours_and_kept_without_us(
        self, engine_args, option, value
    ):
        with pytest.raises(ConfigError, match=f"{option[:-4]} class: {value}"):
            engine_args({"policy": "random"}, **{option: value})
        config = engine_args({"mode": "native"}, **{option: value})
        section = config.scheduler_config if "sched" in option else config.parallel_config
        assert getattr(section, option) == value

    def test_both_of_ours_named_by_hand_are_ours(self, engine_args):
        config = engine_args(
            {"policy": "random"}, scheduler_cls=OUR_SCHEDULERS[False], worker_cls=OUR_WORKERS["cpu"]
        )
        assert config.scheduler_config.scheduler_cls == OUR_SCHEDULERS[False]

    def test_registering_again_changes_nothing(self, engine_args):
        from vllm.engine.arg_utils import EngineArgs

        wrapped = EngineArgs.create_engine_config
        plugin.register()
        plugin.register()
        assert EngineArgs.create_engine_config is wrapped


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"policy": "h20"}, "did you mean 'h2o'"),
        ({"polcy": "h2o"}, "did you mean 'policy'"),
        ({"eviction_ratio": 1.5}, "from 0 to below 1"),
        ({"policy": "random", "kv_budget_tokens": 12}, "at least 21"),
        ({"eviction_ratio": 0.5, "kv_budget_tokens": 64}, "give one of them"),
    ],
)
def test_wrong_settings_stop_the_start(engine_args, settings, found):
    with pytest.raises(ConfigError, match=None) as caught:
        engine_args(settings)
    assert found in str(caught.value) and "\n" not in str(caught.value)
