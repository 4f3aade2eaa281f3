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
        compat.check_worker_side()

    def test_another_signature_is_named(self, monkeypatch):
        from vllm.v1.core.sched.scheduler import Scheduler

        monkeypatch.setattr(Scheduler, "_preempt_request", lambda self, victim: None)
        with pytest.raises(UnsupportedError, match=r"_preempt_request takes \['self', 'victim'\]"):
            compat.check_scheduler_side()

    def test_a_method_that_is_gone_is_named(self, monkeypatch):
        from vllm.v1.worker.block_table import MultiGroupBlockTable

        monkeypatch.delattr(MultiGroupBlockTable, "compute_slot_mapping")
        with pytest.raises(UnsupportedError, match="compute_slot_mapping takes nothing"):
            compat.check_worker_side()

    def test_without_settings_an_unknown_version_is_none_of_our_business(self, monkeypatch):
        from vllm.engine.arg_utils import EngineArgs

        from vtoken.vllm_plugin import plugin

        monkeypatch.setattr(compat, "vllm_version", lambda: "0.99.0")
        before = EngineArgs.create_engine_config
        plugin.register()
        assert EngineArgs.create_engine_config is before


@pytest.fixture
def vllm_config(model_path):
    """A finished VllmConfig, to be spoiled by a test."""
    from vtoken.vllm_plugin import plugin

    plugin.register()
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=str(model_path("tiny-llama")), dtype="float32", max_model_len=256, block_size=16,
        enforce_eager=True,
    ).create_engine_config()  # fmt: skip


# feature -> (attribute path, value); set on a finished config, past vLLM's own cross checks.
FEATURES = {
    "speculative decoding": ("speculative_config", SimpleNamespace(method="ngram")),
    "KV connectors": ("kv_transfer_config", SimpleNamespace(kv_connector="X")),
    "decode or prefill context parallelism": ("parallel_config.decode_context_parallel_size", 2),
    "dual batch overlap": ("parallel_config.enable_dbo", True),
    "an FP8 KV cache": ("cache_config.cache_dtype", "fp8_e4m3"),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_features_are_refused_by_name_and_reason(feature, vllm_config):
    from vtoken.vllm_plugin.support import check_config_supported

    config = VTokenConfig(policy="random")
    check_config_supported(vllm_config, config)
    path, value = FEATURES[feature]
    *parents, name = path.split(".")
    owner = vllm_config
    for p in parents:
        owner = getattr(owner, p)
    object.__setattr__(owner, name, value)
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


@pytest.mark.parametrize("size", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_scored_policies_need_one_rank(size, vllm_config):
    from vtoken.vllm_plugin.support import check_config_supported

    object.__setattr__(vllm_config.parallel_config, size, 2)
    check_config_supported(vllm_config, VTokenConfig(policy="random"))
    with pytest.raises(UnsupportedError, match="not summed over"):
        check_config_supported(vllm_config, VTokenConfig(policy="h2o"))


class TestLayouts:
    def test_several_cache_groups(self):
        from vtoken.vllm_plugin.support import check_scheduler_supported

        scheduler = SimpleNamespace(hash_block_size=16, block_size=16)
        check_scheduler_supported(scheduler, [object()])
        with pytest.raises(UnsupportedError, match="2 KV cache groups"):
            check_scheduler_supported(scheduler, [object(), object()])

    def test_hashes_finer_than_blocks(self):
        from vtoken.vllm_plugin.support import check_scheduler_supported

        scheduler = SimpleNamespace(hash_block_size=8, block_size=16)
        with pytest.raises(UnsupportedError, match="prefix hashes of 8 tokens"):
            check_scheduler_supported(scheduler, [object()])

    def test_layers_that_are_not_full_attention(self):
        import torch
        from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

        from vtoken.vllm_plugin.support import check_layer_spec

        sizes = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
        check_layer_spec("a", FullAttentionSpec(**sizes))
        with pytest.raises(UnsupportedError, match=r"layer b \(SlidingWindowSpec\)"):
            check_layer_spec("b", SlidingWindowSpec(**sizes, sliding_window=32))
        with pytest.raises(UnsupportedError, match="windowed attention"):
            check_layer_spec("c", FullAttentionSpec(**sizes, sliding_window=32))
        with pytest.raises(UnsupportedError, match="windowed attention"):
            check_layer_spec("d", FullAttentionSpec(**sizes, attention_chunk_size=32))

    def test_implementations_that_count_slots(self):
        from vtoken.vllm_plugin.support import check_layer_impl

        check_layer_impl("a", SimpleNamespace(alibi_slopes=None))
        with pytest.raises(UnsupportedError, match="ALiBi"):
            check_layer_impl("b", SimpleNamespace(alibi_slopes=[0.5]))
        with pytest.raises(UnsupportedError, match="shares another layer"):
            check_layer_impl("c", SimpleNamespace(kv_sharing_target_layer_name="x"))


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


def test_a_prompt_that_is_streamed_in_is_refused():
    from vtoken.vllm_plugin.requests import RequestRefused, _checked_process

    def processor(settings: dict, resumable: bool):
        request = SimpleNamespace(
            resumable=resumable, prompt_token_ids=[1], prompt_embeds=None, sampling_params=None
        )
        config = SimpleNamespace(additional_config=settings)
        return _checked_process(lambda self: request), SimpleNamespace(vllm_config=config)

    process, engine = processor({"vtoken": {"policy": "random"}}, resumable=True)
    with pytest.raises(RequestRefused, match="prompt 'an input stream': a prompt that is complete"):
        process(engine)
    for settings, resumable in (
        ({"vtoken": {"policy": "random"}}, False), ({"vtoken": {"mode": "native"}}, True), ({}, True),
    ):  # fmt: skip
        process, engine = processor(settings, resumable)
        assert process(engine).resumable is resumable
