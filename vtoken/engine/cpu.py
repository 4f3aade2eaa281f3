"""What is different when vLLM runs on a CPU."""

from __future__ import annotations

STOCK_BLOCK_TOKENS = 32  # stock CPU attention takes multiples of this


def default_block_size(config) -> int:
    """The smallest block that the attention backend takes: 32 tokens for stock CPU attention."""
    return STOCK_BLOCK_TOKENS


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
