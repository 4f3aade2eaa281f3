"""What vToken refuses, each with its reason; before a model is loaded where that is possible."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest

from vtoken.config import VTokenConfig
from vtoken.errors import ConfigError, UnsupportedError
from vtoken.vllm_plugin import compat

pytestmark = pytest.mark.vllm


class TestVersion:
    @pytest.mark.parametrize("version", ["0.32.0", "0.32.4", "0.32.1+cpu", "0.32.0rc1"])
    def test_tested_ones_pass(self, version):
        compat.check_version(version)

    @pytest.mark.parametrize(
        "version", ["0.31.9", "0.33.0", "1.32.0", "0.3.2", "0.320.0", "dev", "none", "0", ""]
    )
    def test_others_are_refused_with_the_tested_range(self, version):
        with pytest.raises(UnsupportedError) as caught:
            compat.check_version(version)
        assert ">=0.32,<0.33" in str(caught.value) and repr(version) in str(caught.value)

    def test_the_installed_one_has_the_signatures_we_override(self):
        compat.check_scheduler_side()
        compat.check("worker")

    def test_another_signature_is_named(self, monkeypatch):
        from vllm.v1.core.sched.scheduler import Scheduler

        monkeypatch.setattr(Scheduler, "_preempt_request", lambda self, victim: None)
        with pytest.raises(UnsupportedError, match=r"_preempt_request takes \['self', 'victim'\]"):
            compat.check_scheduler_side()

    def test_a_method_that_is_gone_is_named(self, monkeypatch):
        from vllm.v1.worker.block_table import MultiGroupBlockTable

        monkeypatch.delattr(MultiGroupBlockTable, "compute_slot_mapping")
        with pytest.raises(UnsupportedError, match="compute_slot_mapping takes nothing"):
            compat.check("worker")

    def test_an_unknown_version_is_refused_when_vtoken_is_asked_for_and_only_then(
        self, monkeypatch
    ):
        from vllm.engine.arg_utils import EngineArgs

        from vtoken.vllm_plugin import plugin

        stock = getattr(EngineArgs.create_engine_config, "__wrapped__", None)
        monkeypatch.setattr(compat, "vllm_version", lambda: "0.99.0")
        monkeypatch.setattr(
            EngineArgs, "create_engine_config", stock or EngineArgs.create_engine_config
        )
        plugin.register()
        monkeypatch.setattr(
            EngineArgs.create_engine_config, "__wrapped__", lambda self: "made", raising=False
        )
        args = SimpleNamespace(
            additional_config={"vtoken": {"policy": "random"}}, worker_cls="auto"
        )
        with pytest.raises(UnsupportedError, match="'0.99.0'.*>=0.32,<0.33"):
            EngineArgs.create_engine_config(args)
        assert args.worker_cls == "auto"

    @pytest.mark.parametrize("settings", [{}, {"vtoken": {"mode": "native"}}])
    def test_an_unknown_version_without_vtoken_is_left_alone(self, monkeypatch, settings):
        from vllm.engine.arg_utils import EngineArgs

        from vtoken.vllm_plugin import plugin

        monkeypatch.setattr(compat, "vllm_version", lambda: "0.99.0")
        monkeypatch.setattr(EngineArgs, "create_engine_config", lambda self: "made")
        plugin.register()
        args = SimpleNamespace(additional_config=settings, worker_cls="auto")
        assert EngineArgs.create_engine_config(args) == "made" and args.worker_cls == "auto"


@pytest.fixture
def vllm_config(model_path):
    """A finished VllmConfig, to be spoiled by a test."""
    from vtoken.vllm_plugin import plugin

    plugin.register()
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=str(model_path("tiny-llama")), dtype="float32", max_model_len=256, block_size=16,
        enforce_eager=True, additional_config={"vtoken": {"policy": "random"}},
    ).create_engine_config()  # fmt: skip


# feature -> (attribute path, value); set on a finished config, past vLLM's own cross checks.
FEATURES = {
    "speculative decoding": ("speculative_config", SimpleNamespace(method="ngram")),
    "KV connectors": ("kv_transfer_config", SimpleNamespace(kv_connector="X")),
    "decode or prefill context parallelism": ("parallel_config.decode_context_parallel_size", 2),
    "dual batch overlap": ("parallel_config.enable_dbo", True),
    "KV cache dtype: fp8_e4m3": ("cache_config.cache_dtype", "fp8_e4m3"),
    "KV cache dtype: nvfp4": ("cache_config.cache_dtype", "nvfp4"),
    "KV cache dtype: int8_per_token_head": ("cache_config.cache_dtype", "int8_per_token_head"),
    "runner: pooling": ("model_config.runner_type", "pooling"),
    "pipeline ranks: 2": ("parallel_config.pipeline_parallel_size", 2),
    "executor: ray": ("parallel_config.distributed_executor_backend", "ray"),
    "device: tpu": ("device_config.device_type", "tpu"),
    "scheduling policy: lottery": ("scheduler_config.policy", "lottery"),
    "scheduler_config.prefill_schedule_interval": ("scheduler_config.prefill_schedule_interval", 4),
    "cache_config.kv_sharing_fast_prefill": ("cache_config.kv_sharing_fast_prefill", True),
    "not listed: diffusion_config": ("diffusion_config", SimpleNamespace()),
    "parallel_config.enable_eplb": ("parallel_config.enable_eplb", True),
}


def _spoil(vllm_config, path: str, value) -> None:
    *parents, name = path.split(".")
    owner = vllm_config
    for p in parents:
        owner = getattr(owner, p)
    owner.__dict__[name] = value  # the name may be a cached property's


UNTESTED = {
    "LoRA adapters": ("lora_config", SimpleNamespace()),
    "data parallelism": ("parallel_config.data_parallel_size", 2),
    "scheduling policy: priority": ("scheduler_config.policy", "priority"),
    "images and other media": ("model_config.is_multimodal_model", True),
}


@pytest.mark.parametrize("feature", UNTESTED)
def test_what_is_let_in_untested_is_said(feature, vllm_config, caplog, monkeypatch):
    import logging

    from vtoken.vllm_plugin.support import check_config_supported

    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    if feature.startswith("images"):
        monkeypatch.setattr(type(vllm_config.model_config), "is_multimodal_model", True)
    else:
        _spoil(vllm_config, *UNTESTED[feature])
    check_config_supported(vllm_config, VTokenConfig(policy="random"))
    assert f"vToken with {feature} has no test" in caplog.text


@pytest.mark.parametrize("feature", FEATURES)
def test_features_are_refused_by_name_and_reason(feature, vllm_config):
    from vtoken.vllm_plugin.support import check_config_supported

    config = VTokenConfig(policy="random")
    check_config_supported(vllm_config, config)
    path, value = FEATURES[feature]
    _spoil(vllm_config, path, value)
    with pytest.raises(UnsupportedError) as caught:
        check_config_supported(vllm_config, config)
    assert feature in str(caught.value) and len(caught.value.allowed) > 20


def test_runner_v2_is_refused(vllm_config, monkeypatch):
    from vtoken.vllm_plugin.support import check_config_supported

    monkeypatch.setattr(type(vllm_config), "use_v2_model_runner", True)
    with pytest.raises(UnsupportedError, match="VLLM_USE_V2_MODEL_RUNNER=0"):
        check_config_supported(vllm_config, VTokenConfig(policy="random"))


def test_encoder_decoder_models_are_refused(vllm_config):
    from vtoken.vllm_plugin.support import check_config_supported

    vllm_config.model_config.__dict__["is_encoder_decoder"] = True  # a cached property
    with pytest.raises(UnsupportedError, match="encoder-decoder"):
        check_config_supported(vllm_config, VTokenConfig(policy="random"))


def test_scored_policies_need_one_rank(vllm_config):
    from vtoken.vllm_plugin.support import check_config_supported

    vllm_config.parallel_config.__dict__["tensor_parallel_size"] = 2
    check_config_supported(vllm_config, VTokenConfig(policy="random"))
    with pytest.raises(UnsupportedError, match="not summed over"):
        check_config_supported(vllm_config, VTokenConfig(policy="h2o"))


class TestLayouts:
    def test_several_cache_groups(self):
        from vtoken.vllm_plugin.support import check_scheduler_supported

        scheduler = SimpleNamespace(hash_block_size=16, block_size=16)
        check_scheduler_supported(scheduler, [object()])
        with pytest.raises(UnsupportedError, match="KV cache groups: 2"):
            check_scheduler_supported(scheduler, [object(), object()])

    def test_hashes_finer_than_blocks(self):
        from vtoken.vllm_plugin.support import check_scheduler_supported

        scheduler = SimpleNamespace(hash_block_size=8, block_size=16)
        with pytest.raises(UnsupportedError, match="prefix hashes per block: 2.0"):
            check_scheduler_supported(scheduler, [object()])

    def test_layers_that_are_not_full_attention(self):
        import torch
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode, SlidingWindowSpec

        from vtoken.vllm_plugin.support import check_layer_specs

        sizes = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
        check_layer_specs({"a": FullAttentionSpec(**sizes), "b": FullAttentionSpec(**sizes)})
        for spec, found in (
            (
                SlidingWindowSpec(**sizes, sliding_window=32),
                "attention: SlidingWindowSpec in layer b",
            ),
            (FullAttentionSpec(**sizes, sliding_window=32), "windowed attention in layer b"),
            (FullAttentionSpec(**sizes, attention_chunk_size=32), "windowed attention in layer b"),
            (FullAttentionSpec(**sizes, non_causal=True), "non-causal attention in layer b"),
            (
                FullAttentionSpec(**sizes, kv_quant_mode=KVQuantMode(1)),
                "quantised KV: .* in layer b",
            ),
            (FullAttentionSpec(**sizes, tokens_per_state=2), "compressed KV in layer b"),
        ):
            with pytest.raises(UnsupportedError, match=found):
                check_layer_specs({"a": FullAttentionSpec(**sizes), "b": spec})

    @pytest.mark.parametrize("other", [{"num_kv_heads": 2}, {"head_size": 16}])
    def test_layers_of_several_shapes(self, other):
        import torch
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        from vtoken.vllm_plugin.support import check_layer_specs

        sizes = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
        specs = {"a": FullAttentionSpec(**sizes), "b": FullAttentionSpec(**{**sizes, **other})}
        with pytest.raises(UnsupportedError, match="KV shapes of layers: 2.*must be equal"):
            check_layer_specs(specs)

    @pytest.mark.parametrize(
        ("attributes", "found"),
        [
            ({"alibi_slopes": [0.5]}, "ALiBi in layer a"),
            ({"kv_sharing_target_layer_name": "x"}, "share another layer's KV in layer a"),
            ({"sinks": [0.1]}, "learned attention sinks in layer a"),
        ],
    )
    def test_implementations_that_count_slots(self, attributes, found):
        from vtoken.vllm_plugin.cpu_backend import VTokenCPUAttentionImpl
        from vtoken.vllm_plugin.support import check_layer_impls

        impl = VTokenCPUAttentionImpl.__new__(VTokenCPUAttentionImpl)
        impl.alibi_slopes = impl.kv_sharing_target_layer_name = impl.sinks = None
        check_layer_impls({"a": SimpleNamespace(impl=impl)})
        vars(impl).update(attributes)
        with pytest.raises(UnsupportedError, match=found):
            check_layer_impls({"a": SimpleNamespace(impl=impl)})

    def test_an_implementation_that_nobody_listed(self):
        from vtoken.vllm_plugin.support import check_layer_impls

        with pytest.raises(UnsupportedError, match="attention implementation: SimpleNamespace"):
            check_layer_impls({"a": SimpleNamespace(impl=SimpleNamespace())})


@pytest.mark.parametrize("policy", ["streaming-llm", "h2o"])
def test_pooling_models_do_not_start(policy, model_path):
    """They would never finish: vLLM compares a prompt's length with a physical one there."""
    from vtoken.vllm_plugin import plugin

    plugin.register()
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs(
        model=str(model_path("tiny-llama")), runner="pooling", convert="embed", dtype="float32",
        max_model_len=256, block_size=32, enforce_eager=True,
        additional_config={"vtoken": {"policy": policy, "kv_budget_tokens": 96}},
    )  # fmt: skip
    with pytest.raises(ConfigError, match="runner: pooling.*use --runner generate"):
        args.create_engine_config()


def test_a_list_of_plugins_without_ours_gets_our_name(monkeypatch):
    """Under `VLLM_PLUGINS=other` a server would run without eviction."""
    import os

    from vtoken.engine.server import allow_status_page

    for wanted in (True, False):
        monkeypatch.setenv("VLLM_PLUGINS", "lora_filesystem_resolver")
        monkeypatch.setenv("VTOKEN_STATUS_PAGE", "1")
        allow_status_page(wanted)
        assert os.environ["VLLM_PLUGINS"] == "lora_filesystem_resolver,vtoken"


def test_a_model_with_sliding_windows_does_not_start(model_path, tmp_path):
    """A whole start-up: the refusal comes through vLLM's layers as one of ours."""
    from one_engine import _open

    from vtoken.engine import EngineSettings, open_engine

    folder = tmp_path / "windowed"
    shutil.copytree(model_path("tiny-mistral"), folder)
    config = json.loads((folder / "config.json").read_text())
    config["sliding_window"] = 64
    (folder / "config.json").write_text(json.dumps(config))
    while _open:
        _open.pop()[1].close()
    settings = EngineSettings(model=str(folder), block_size=32, max_model_len=256, num_kv_blocks=40)
    with pytest.raises(ConfigError, match="SlidingWindowSpec"):
        open_engine(settings, VTokenConfig(policy="random"))


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"resumable": True}, "input streams.*send a prompt that is complete"),
        ({"prompt_token_ids": None, "prompt_embeds": [0.0]}, "prompts given as embeddings"),
        ({"prompt_embeds": [0.0]}, "prompts given as embeddings"),
    ],
)
def test_prompts_that_cannot_be_counted_are_refused_alone(fields, found):
    from vtoken.vllm_plugin.requests import RequestRefused, _checked_generate, _checked_process

    base = {"resumable": False, "prompt_token_ids": [1], "prompt_embeds": None}
    request = SimpleNamespace(**{**base, **fields}, sampling_params=SimpleNamespace(max_tokens=1))
    process = _checked_process(lambda self: request)
    generate = _checked_generate(lambda self, prompt, params: "streaming")

    def engine(settings: dict):
        config = SimpleNamespace(
            additional_config=settings,
            cache_config=SimpleNamespace(block_size=16, num_gpu_blocks=None),
        )
        return SimpleNamespace(vllm_config=config)

    with pytest.raises(RequestRefused, match=found):
        process(engine({"vtoken": {"policy": "random"}}))
    if "prompt_embeds" in fields:  # before a stream's status line is sent
        with pytest.raises(RequestRefused, match=found):
            generate(engine({"vtoken": {"policy": "random"}}), vars(request), None)
    for settings in ({"vtoken": {"mode": "native"}}, {}):
        assert process(engine(settings)) is request
        assert generate(engine(settings), vars(request), None) == "streaming"
    request.__dict__.update(base)
    assert process(engine({"vtoken": {"policy": "random"}})) is request


def test_a_prompt_given_as_embeddings_is_refused_and_the_engine_goes_on():
    import torch
    from one_engine import engine_for, prompts, run
    from vllm import SamplingParams

    from vtoken.vllm_plugin.requests import RequestRefused

    config = VTokenConfig(policy="streaming-llm", kv_budget_tokens=64)
    engine = engine_for(config, vllm_args={"enable_prompt_embeds": True})
    embeds = torch.randn(20, engine.vllm_config.model_config.get_hidden_size())
    with pytest.raises(RequestRefused, match="prompts given as embeddings.*token ids"):
        engine.llm_engine.add_request(
            "embeds", {"prompt_embeds": embeds}, SamplingParams(max_tokens=4, ignore_eos=True)
        )
    assert [len(f.output_token_ids) for f in run(engine, prompts(2))] == [40, 40]
