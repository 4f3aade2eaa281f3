"""What is different when vLLM runs on a CPU."""

from __future__ import annotations

from collections.abc import Collection

STOCK_BLOCK_TOKENS = 32  # stock CPU attention takes multiples of this


def default_block_size(config) -> int:
    """The smallest block that the attention backend takes: 32 tokens for stock CPU attention."""
    return STOCK_BLOCK_TOKENS


def platform_defaults(given: Collection[str], config, *, pool_bytes: int = 2 << 30) -> dict:
    """Arguments of vLLM's engine that a CPU gets where they are not given; keys are its names.

    Args:
        given: names that were given, vLLM's or EngineSettings'.
        pool_bytes: the KV pool where nothing says how large it is.
    """
    if not engine_runs_on_cpu():
        return {}
    defaults = {
        "block_size": default_block_size(config),
        "dtype": "float32",  # about twice as fast as bfloat16 without AMX
        "enforce_eager": True,  # inductor gains nothing here, and costs minutes
        "kv_cache_memory_bytes": pool_bytes,
    }
    taken = set(given)
    if "compilation_config" in taken:
        taken.add("enforce_eager")
    if "gpu_memory_utilization" in taken:
        taken.add("kv_cache_memory_bytes")
    return {name: value for name, value in defaults.items() if name not in taken}


def keep_async_scheduling() -> None:
    """Stop vLLM's CPU platform from turning asynchronous scheduling off. For tests.

    vLLM sees no gain in it on a CPU; the code paths are the ones a GPU runs, so tests want them.
    """
    from vllm.platforms.cpu import CpuPlatform

    stock = CpuPlatform.check_and_update_config.__func__
    if getattr(stock, "keeps_async", False):
        return

    def check_and_update_config(cls, vllm_config) -> None:
        wanted = vllm_config.scheduler_config.async_scheduling
        stock(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = bool(wanted)

    check_and_update_config.keeps_async = True
    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def engine_runs_on_cpu() -> bool:
    """Whether vLLM, as installed here, runs its models on the CPU."""
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


def import_engines() -> None:
    """Import what engines need, and leave it out of every later garbage collection.

    vLLM collects garbage about ten times when an engine is closed, and its modules hold most of
    the objects there are: four engines would spend a tenth of a verification on that.
    """
    import gc

    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_worker  # noqa: F401

    gc.collect()
    gc.freeze()
