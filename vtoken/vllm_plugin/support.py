"""What vToken refuses at start-up, each with its reason. Lift one by one, with tests."""

from __future__ import annotations

from vllm.v1.kv_cache_interface import FullAttentionSpec

from vtoken.config import VTokenConfig
from vtoken.errors import UnsupportedError
from vtoken.policies.base import ScoreKind

# feature -> (test on a VllmConfig, why it cannot work yet)
_REFUSED = [
    (
        "speculative decoding",
        lambda c: c.speculative_config is not None,
        "rejected drafts would take back tokens that were already placed",
    ),
    (
        "KV connectors",
        lambda c: c.kv_transfer_config is not None,
        "a connector addresses KV by block position, which relocation changes",
    ),
    (
        "decode or prefill context parallelism",
        lambda c: (
            c.parallel_config.decode_context_parallel_size > 1
            or c.parallel_config.prefill_context_parallel_size > 1
        ),
        "a block's tokens are spread over ranks there",
    ),
    (
        "dual batch overlap",
        lambda c: c.parallel_config.enable_dbo,
        "the hooks rewrite inputs once per step, not once per microbatch",
    ),
    (
        "encoder-decoder models",
        lambda c: c.model_config.is_encoder_decoder,
        "cross attention keeps a second cache that policies do not know",
    ),
    (
        "an FP8 KV cache",
        lambda c: str(c.cache_config.cache_dtype).startswith("fp8"),
        "relocation of scaled KV is not tested; use --kv-cache-dtype auto",
    ),
    (
        "Model Runner V2",
        lambda c: c.use_v2_model_runner,
        "the hooks are written for runner V1; set VLLM_USE_V2_MODEL_RUNNER=0",
    ),
]


def check_config_supported(
    vllm_config, config: VTokenConfig, block_size: int | None = None
) -> None:
    """Refuse what the hooks cannot serve.

    Raises:
        UnsupportedError: names the feature and the reason.
    """
    for feature, present, why in _REFUSED:
        if present(vllm_config):
            raise UnsupportedError("vtoken with", feature, why)
    parallel = vllm_config.parallel_config
    if config.evicts:
        policy = config.make_policy(block_size or vllm_config.cache_config.block_size or 16)
        size = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        if policy.score_kind is not ScoreKind.NONE and size > 1:
            raise UnsupportedError(
                "--policy",
                config.policy,
                "scores are not summed over tensor or pipeline ranks yet; "
                "streaming-llm, sliding-window and random need none",
            )


def check_scheduler_supported(scheduler, managers) -> None:
    """Refuse KV cache layouts the hooks cannot serve.

    Raises:
        UnsupportedError: names the layout and the reason.
    """
    if len(managers) != 1:
        raise UnsupportedError(
            "vtoken with", f"{len(managers)} KV cache groups",
            "hybrid models keep several caches per request; only full attention works",
        )  # fmt: skip
    if scheduler.hash_block_size != scheduler.block_size:
        raise UnsupportedError(
            "vtoken with", f"prefix hashes of {scheduler.hash_block_size} tokens",
            "hits inside a block would share a block that may be rewritten",
        )  # fmt: skip


def check_layer_spec(name: str, spec) -> None:
    """Refuse attention layers that use physical distance or a layout of their own.

    Raises:
        UnsupportedError: names the layer and the reason.
    """
    if type(spec) is not FullAttentionSpec:
        raise UnsupportedError(
            "vtoken with", f"layer {name} ({type(spec).__name__})",
            "only full attention layers keep one relocatable entry per token",
        )  # fmt: skip
    if spec.sliding_window or spec.attention_chunk_size:
        raise UnsupportedError(
            "vtoken with", f"layer {name} (windowed attention)",
            "a window counts physical distance, which relocation changes",
        )  # fmt: skip


def check_layer_impl(name: str, impl) -> None:
    """Refuse attention implementations whose result depends on where an entry lies.

    Raises:
        UnsupportedError: names the layer and the reason.
    """
    if getattr(impl, "alibi_slopes", None) is not None:
        raise UnsupportedError(
            "vtoken with", f"layer {name} (ALiBi)", "ALiBi counts physical distance"
        )
    if getattr(impl, "kv_sharing_target_layer_name", None):
        raise UnsupportedError(
            "vtoken with", f"layer {name} (shares another layer's KV)",
            "moves and scores would be applied twice",
        )  # fmt: skip
