"""vLLM with a model, in this process, one step at a time."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence

from vtoken.config import VTokenConfig
from vtoken.engine.base import FinishedRequest, StepEngine
from vtoken.engine.settings import EngineSettings
from vtoken.errors import ConfigError, EngineError, VTokenError


def prepare_process() -> None:
    """Set what vLLM reads from the environment for an engine inside this process."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


class RealEngine(StepEngine):
    """A vLLM engine with vToken's hooks (unless the mode is native), in process.

    Attributes:
        llm_engine: vLLM's LLMEngine.
        vllm_config: what it was built from.
    """

    def __init__(self, settings: EngineSettings, config: VTokenConfig | None = None) -> None:
        prepare_process()
        self.settings, self.config = settings, config
        self.llm_engine = self._build()
        core = self.llm_engine.engine_core.engine_core
        self.core, self.scheduler = core, core.scheduler
        self.vllm_config = self.llm_engine.vllm_config
        manager = self.scheduler.kv_cache_manager.coordinator.single_type_managers[0]
        self.block_size = manager.block_size
        self.num_usable_blocks = self.block_pool.num_gpu_blocks - 1
        self._num_output: dict[str, int] = {}

    def _build(self):
        from vtoken.models import resolve_model
        from vtoken.vllm_plugin import plugin

        plugin.register()
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        args = self._engine_args(resolve_model(self.settings.model))
        try:
            return LLMEngine.from_engine_args(EngineArgs(**args))
        except VTokenError:
            raise
        except Exception as error:
            cause = _config_cause(error)
            if cause is not None:
                raise cause from None
            raise EngineError(f"vLLM could not start: {error}") from error

    def _engine_args(self, model: str) -> dict:
        args = {"disable_log_stats": True, **self.settings.vllm_settings(), "model": model}
        if self.config is not None and self.config.hooks_installed:
            settings = self.config.model_dump(exclude_defaults=True) | {"mode": self.config.mode}
            args["additional_config"] = {"vtoken": settings}
        self._add_platform_defaults(args)
        args.update(self.settings.vllm_args)
        return args

    def _add_platform_defaults(self, args: dict) -> None:
        from vtoken.engine import cpu

        args.update(cpu.platform_defaults(args, self.config))
        if self.settings.async_scheduling:
            args["async_scheduling"] = True
        if not cpu.engine_runs_on_cpu():
            return
        if self.settings.async_scheduling:
            cpu.keep_async_scheduling()
        else:  # said outright: an engine of this process may have kept it on for good
            args.setdefault("async_scheduling", False)

    # ---- requests --------------------------------------------------------------------------

    def add(
        self, req_id, prompt_token_ids, max_tokens, *, logprobs=False, ignore_eos=True,
        arrival_s=None,
    ) -> None:  # fmt: skip
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            logprobs=0 if logprobs else None,
            detokenize=False,
        )
        try:
            self.llm_engine.add_request(
                req_id, {"prompt_token_ids": list(prompt_token_ids)}, params
            )
        except VTokenError:
            raise
        except ValueError as error:
            raise ConfigError("request", req_id, str(error)) from None

    def step(self) -> tuple[dict[str, int], list[FinishedRequest]]:
        new_tokens: dict[str, int] = {}
        finished: list[FinishedRequest] = []
        for out in self.llm_engine.step():
            total = len(out.outputs[0].token_ids)
            count = total - self._num_output.get(out.request_id, 0)
            if count:
                new_tokens[out.request_id] = count
                self._num_output[out.request_id] = total
            if out.finished:
                self._num_output.pop(out.request_id, None)
                finished.append(_finished(out))
        return new_tokens, finished

    def abort(self, req_ids: Sequence[str]) -> None:
        self.llm_engine.abort_request(list(req_ids))
        for req_id in req_ids:  # a later request may bear the same name
            self._num_output.pop(req_id, None)

    def has_unfinished(self) -> bool:
        return self.llm_engine.has_unfinished_requests() or self.scheduler.has_requests()

    @property
    def tokenizer(self):
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.vllm_config.model_config.tokenizer)

    @property
    def runner(self):
        """The model runner of the one worker in this process."""
        return self.core.model_executor.driver_worker.worker.model_runner

    def reconfigure(self, config: VTokenConfig) -> None:
        """Take other vToken settings while idle; the engine must have hooks already.

        Raises:
            ConfigError: the settings do not fit the engine.
        """
        from vtoken.vllm_plugin.support import check_config_supported
        from vtoken.vllm_plugin.vocabulary import with_vocabulary

        assert self.hooks is not None and not self.scheduler.has_requests()
        check_config_supported(self.vllm_config, config, self.block_size)
        full = with_vocabulary(config, self.vllm_config.model_config)
        # Scores start anew, so what the cache holds of earlier requests would have none.
        self.scheduler.reset_prefix_cache()
        self.scheduler.vtoken_reconfigure(full)
        self.vllm_config.additional_config["vtoken"] = full.model_dump(exclude_defaults=True)
        self.runner.vtoken_reconfigure(full)
        self.config = config

    def close(self) -> None:
        if self.llm_engine is None:
            return
        self.core.shutdown()
        self.llm_engine = self.core = self.scheduler = self.vllm_config = None
        gc.collect()
        from vllm.distributed import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()


def _finished(out) -> FinishedRequest:
    completion = out.outputs[0]
    logprobs = [next(iter(x.values())).logprob for x in completion.logprobs or ()]
    return FinishedRequest(
        req_id=out.request_id,
        prompt_token_ids=list(out.prompt_token_ids),
        output_token_ids=list(completion.token_ids),
        logprobs=logprobs,
        finish_reason=completion.finish_reason or "",
    )


def _config_cause(error: BaseException) -> VTokenError | None:
    """The VTokenError in an exception's chain, if one is there."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, VTokenError):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None
