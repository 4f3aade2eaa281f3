"""Devices, model shapes and the memory model, against published figures."""

from __future__ import annotations

import dataclasses
import json

import pytest

from vtoken.errors import ConfigError, UnsupportedError
from vtoken.experiments.planning.devices import (
    DEFAULT_OVERHEAD,
    GIB,
    OverheadRule,
    get_device,
    load_devices,
    need_memory,
    plan_memory,
)
from vtoken.experiments.planning.model_shapes import (
    ARCHITECTURES,
    derived_num_params,
    get_model_shape,
    load_models,
)
from vtoken.experiments.report.environment import host_memory_bytes

H100 = get_device("h100-80g")
LLAMA = get_model_shape("meta-llama/Llama-3.1-8B")
QWEN = get_model_shape("Qwen/Qwen2.5-14B")


@pytest.mark.parametrize(
    ("model", "gpu_mem_util", "published_blocks", "tolerance"),
    [(LLAMA, 0.35, 5427, 0.01), (LLAMA, 0.50, 11519, 0.01), (QWEN, 0.50, 3261, 0.05)],
)
def test_one_rule_gives_the_published_pools(model, gpu_mem_util, published_blocks, tolerance):
    plan = plan_memory(H100, model, gpu_mem_util=gpu_mem_util)
    assert plan.num_usable_blocks == pytest.approx(published_blocks, rel=tolerance)
    assert plan.overhead_rule is DEFAULT_OVERHEAD


def test_published_pools_give_the_published_native_frontiers():
    for gpu_mem_util, native, packed in [(0.35, 5, 10), (0.50, 11, 22)]:
        blocks = plan_memory(H100, LLAMA, gpu_mem_util=gpu_mem_util).num_usable_blocks
        assert (blocks // 1020, blocks // 512) == (native, packed)


def test_plan_adds_up_and_prints_its_constants():
    plan = plan_memory(H100, LLAMA, gpu_mem_util=0.5)
    used = plan.weights_bytes + plan.overhead_bytes + plan.kv_bytes
    assert used == int(0.5 * H100.memory_bytes)
    assert plan.block_bytes == 2 * 32 * 8 * 128 * 2 * 16
    # One block is vLLM's null block.
    assert (plan.num_usable_blocks + 1) * plan.block_bytes <= plan.kv_bytes
    text = "\n".join(plan.describe())
    for constant in ("0.35 GiB", "8,192", "1,024", "79.11", "14.96", f"{plan.num_usable_blocks:,}"):
        assert constant in text
    row = plan.row()
    assert row["modelled"] is True and row["overhead_fixed_bytes"] == DEFAULT_OVERHEAD.fixed_bytes
    assert all(isinstance(v, (int, float, str, bool)) for v in row.values())


@pytest.mark.parametrize("blocks", [1, 100, 5427, 11519])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_need_is_the_inverse_of_plan(blocks, ranks):
    need = need_memory(H100, LLAMA, blocks, tensor_parallel_size=ranks)
    assert need.fits
    plan = plan_memory(H100, LLAMA, gpu_mem_util=need.gpu_mem_util, tensor_parallel_size=ranks)
    spare = 0.0001 * H100.memory_bytes / plan.block_bytes
    assert blocks <= plan.num_usable_blocks <= blocks + spare + 1
    by_bytes = plan_memory(
        H100, LLAMA, kv_cache_memory_bytes=need.kv_bytes, tensor_parallel_size=ranks
    )
    assert by_bytes.num_usable_blocks == blocks
    assert need.kv_gib == need.kv_bytes / GIB


def test_need_says_when_it_does_not_fit():
    need = need_memory(H100, LLAMA, 50_000)
    assert need.gpu_mem_util > 1 and not need.fits


def test_pool_can_be_given():
    assert plan_memory(H100, LLAMA, num_kv_blocks=5427).num_usable_blocks == 5427
    plan = plan_memory(H100, LLAMA, kv_cache_memory_bytes=10 * GIB, gpu_mem_util=0.1)
    assert plan.num_usable_blocks == 10 * 512 - 1 and plan.gpu_mem_util is None
    assert "as given" in plan.describe()[0]
    for option, value in [
        ("kv_cache_memory_bytes", 70 * GIB), ("kv_cache_memory_bytes", 2**20),
        ("num_kv_blocks", 0), ("num_kv_blocks", 10**6),
    ]:  # fmt: skip
        with pytest.raises(ConfigError, match=f"--{option.replace('_', '-')} {value}.*14.96 GiB"):
            plan_memory(H100, LLAMA, **{option: value})


def test_kv_dtype_block_size_and_ranks_change_the_pool():
    base = plan_memory(H100, LLAMA, gpu_mem_util=0.5).num_usable_blocks
    fp8 = plan_memory(H100, LLAMA, gpu_mem_util=0.5, kv_cache_dtype="fp8").num_usable_blocks
    assert fp8 == pytest.approx(2 * base, abs=2)
    big = plan_memory(H100, LLAMA, gpu_mem_util=0.5, block_size=32).num_usable_blocks
    assert big == pytest.approx(base / 2, abs=2)
    two = plan_memory(H100, LLAMA, gpu_mem_util=0.5, tensor_parallel_size=2)
    assert two.num_usable_blocks > 2 * base and two.weights_bytes * 2 == LLAMA.weights_bytes
    # More ranks than KV heads: the heads are replicated, a block shrinks no further.
    eight, sixteen = (plan_memory(H100, LLAMA, tensor_parallel_size=n).block_bytes for n in (8, 16))
    assert eight == sixteen


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu_mem_util": 0.0}, "--gpu-mem-util 0.0: a share above 0"),
        ({"gpu_mem_util": 1.01}, "--gpu-mem-util 1.01"),
        ({"block_size": 0}, "--block-size 0"),
        ({"tensor_parallel_size": 3}, "--tensor-parallel-size 3: a divisor of the 32 heads"),
        ({"tensor_parallel_size": 0}, "--tensor-parallel-size 0"),
        ({"kv_cache_dtype": "fp9"}, "--kv-cache-dtype 'fp9': did you mean 'fp8'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ConfigError) as error:
        plan_memory(H100, LLAMA, **options)
    assert message in str(error.value) and error.value.exit_code == 2


def test_weights_that_do_not_fit_say_what_would_do():
    with pytest.raises(ConfigError) as error:
        plan_memory(H100, LLAMA, gpu_mem_util=0.2)
    text = str(error.value)
    assert "14.96 GiB of weights" in text and "0.2 x 79.11 GiB is 15.82 GiB" in text
    least = float(error.value.allowed.split(",")[0].removeprefix("at least "))
    assert plan_memory(H100, LLAMA, gpu_mem_util=least).num_usable_blocks >= 1
    with pytest.raises(ConfigError):
        plan_memory(H100, LLAMA, gpu_mem_util=least - 0.01)

    large = get_model_shape("llama-3.1-70b")
    with pytest.raises(ConfigError, match="--device 'h100-80g'.*--tensor-parallel-size 2, since"):
        plan_memory(H100, large)
    assert plan_memory(H100, large, tensor_parallel_size=2).num_usable_blocks >= 1
    with pytest.raises(ConfigError, match="--device 'l4'.*--tensor-parallel-size 8"):
        plan_memory(get_device("l4"), large)


def test_overhead_rule_has_one_form():
    rule = OverheadRule(fixed_bytes=7, num_batched_tokens=3, num_seqs=5)
    expected = 7 + 3 * (2 * 4096 + 3 * 14336) * 2 + 5 * 128256 * 8
    assert rule.overhead_bytes(LLAMA) == expected
    assert rule.overhead_bytes(LLAMA, 2) == expected - 3 * 3 * 14336


def test_every_device_is_complete_and_distinct():
    devices, _ = load_devices()
    assert {
        "a10", "l4", "l40s", "a100-40g", "a100-80g", "h100-80g", "h200", "b200", "mi300x", "cpu",
    } <= set(devices)  # fmt: skip
    assert devices["cpu"].memory_bytes == host_memory_bytes()
    gpus = [d for d in devices.values() if d.kind == "gpu"]
    for device in gpus:
        assert 20 * GIB < device.memory_bytes < 200 * GIB
        # A roofline's corner lies between a hundred and a thousand operations a byte.
        assert 100 < device.flops_per_s / device.bandwidth_bytes_per_s < 1000


def test_device_names():
    for name in ("H100-80G", "h100", "H100 80GB", "h100_80g", " h100-80 "):
        assert get_device(name) is H100
    assert get_device("A100").name == "a100-80g"
    with pytest.raises(ConfigError, match="--device 'h300': did you mean 'h200'"):
        get_device("h300")
    with pytest.raises(ConfigError, match="one of a10, a100-40g"):
        get_device("toaster")


@pytest.mark.parametrize("name", load_models())
def test_published_parameter_counts_follow_from_the_shapes(name):
    shape, _ = load_models()[name]
    assert derived_num_params(dataclasses.asdict(shape)) == shape.num_params
    assert shape.num_heads % shape.num_kv_heads == 0
    assert shape.architecture in ARCHITECTURES


def test_model_names():
    for name in ("Llama-3.1-8B-Instruct", "meta-llama/Meta-Llama-3.1-8B", "llama-3.1-8b"):
        assert get_model_shape(name) is LLAMA
    assert get_model_shape("smollm2-135m").num_params == 134515008
    assert get_model_shape("mistral-7b").name == "mistralai/Mistral-7B-v0.3"
    assert get_model_shape("google/gemma-7b-it").head_size == 256
    with pytest.raises(ConfigError, match="did you mean 'meta-llama/Llama-3.1-8B'"):
        get_model_shape("llama-3.1-9b")
    with pytest.raises(ConfigError, match="one of meta-llama/.*or a folder with a config.json"):
        get_model_shape("gpt-5")


def test_dtype_changes_weights_and_kv():
    wide = LLAMA.with_dtype("float32")
    assert wide.weights_bytes == 2 * LLAMA.weights_bytes
    assert wide.kv_bytes_per_token() == 2 * LLAMA.kv_bytes_per_token() == 2 * 131072
    assert LLAMA.with_dtype("auto") is LLAMA
    with pytest.raises(ConfigError, match="--dtype 'bfloat17': did you mean 'bfloat16'"):
        LLAMA.with_dtype("bfloat17")


CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 100,
    "max_position_embeddings": 512, "torch_dtype": "float16", "tie_word_embeddings": False,
}  # fmt: skip


def put(tmp_path, **changes):
    config = {k: v for k, v in (CONFIG | changes).items() if v is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_local_config(tmp_path):
    folder = put(tmp_path)
    shape = get_model_shape(folder)
    assert shape == get_model_shape(str(folder / "config.json"))
    assert (shape.head_size, shape.num_kv_heads, shape.dtype_bytes) == (8, 4, 2)
    assert shape.num_params == 2 * 100 * 64 + 64 + 2 * (
        64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 128
    )
    assert get_model_shape(put(tmp_path, num_key_value_heads=None)).num_kv_heads == 8
    assert get_model_shape(put(tmp_path, head_dim=32, dtype="float32")).head_size == 32


def test_local_weight_index_counts_what_is_on_disk(tmp_path):
    folder = put(tmp_path, quantization_config={"bits": 4})
    with pytest.raises(UnsupportedError, match="quantised weights only with"):
        get_model_shape(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 12345}}))
    assert get_model_shape(folder).weights_bytes == 12345
    index.write_text("{}")
    assert get_model_shape(put(tmp_path)).weights_file_bytes is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"kv_lora_rank": 512}, "latent attention .MLA."),
        ({"sliding_window": 4096}, "a sliding window of 4096 tokens"),
        ({"architectures": ["MistralForCausalLM"]}, "a sliding window of 4096 tokens"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "type sliding_attention"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "type linear_attention"),
        ({"mamba_d_state": 16}, "a hybrid with state-space"),
        ({"full_attention_interval": 4}, "a hybrid with state-space"),
        ({"attention_chunk_size": 8192}, "chunked attention"),
        ({"alibi": True}, "ALiBi"),
        ({"num_local_experts": 8}, "mixture of experts"),
        ({"vision_config": {"a": 1}}, "multimodal"),
        ({"num_kv_shared_layers": 3}, "shares KV between layers"),
        ({"architectures": ["OPTForCausalLM"]}, "not OPTForCausalLM"),
        ({"architectures": None}, "not none"),
    ],
)
def test_unsupported_architectures_are_refused_with_the_reason(tmp_path, changes, why):
    with pytest.raises(UnsupportedError, match=why) as error:
        get_model_shape(put(tmp_path, **changes))
    assert error.value.exit_code == 2 and "\n" not in str(error.value)


def test_switched_off_windows_are_no_windows(tmp_path):
    off = {"sliding_window": 131072, "use_sliding_window": False}
    assert get_model_shape(put(tmp_path, **off)).num_layers == 2
    qwen = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 131072}
    assert get_model_shape(put(tmp_path, **qwen)).num_layers == 2
    assert get_model_shape(put(tmp_path, layer_types=["full_attention"] * 2)).num_layers == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "a whole number in 'hidden_size'"),
        ({"num_hidden_layers": -2}, "a whole number in 'num_hidden_layers'"),
        ({"vocab_size": "many"}, "a whole number in 'vocab_size'"),
        ({"num_key_value_heads": 3}, "KV heads divide"),
        ({"torch_dtype": "int3"}, "a dtype among"),
    ],
)
def test_broken_configs(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        get_model_shape(put(tmp_path, **changes))


def test_unreadable_configs(tmp_path):
    with pytest.raises(ConfigError, match="a readable config.json"):
        get_model_shape(tmp_path)
    for text, message in [("{", "is JSON"), ("[]", "holds an object")]:
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=message):
            get_model_shape(tmp_path)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [True, False])
def test_parameter_count_is_that_of_the_real_model(tmp_path, architecture, tied):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    extra = {"sliding_window": None} if architecture == "MistralForCausalLM" else {}
    config = getattr(transformers, architecture.replace("ForCausalLM", "Config"))(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=2, head_dim=16, vocab_size=50, tie_word_embeddings=tied,
        pad_token_id=None, bos_token_id=None, eos_token_id=None, **extra,
    )  # fmt: skip
    config.architectures = [architecture]
    if "head_dim" not in config.to_dict():
        config.num_attention_heads = 4
        config.num_key_value_heads = 2
    with torch.device("meta"):
        model = getattr(transformers, architecture)(config)
    (tmp_path / "config.json").write_text(json.dumps(json.loads(config.to_json_string())))
    counted = sum(p.numel() for p in model.parameters())
    assert get_model_shape(tmp_path).num_params == counted
