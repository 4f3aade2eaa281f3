"""vLLM's two schedulers with vToken's step in them; what is decided is in vtoken.scheduling."""

from __future__ import annotations

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from vtoken.config import VTokenConfig
from vtoken.core.ops import TableOps
from vtoken.kernels.tables import load_ops
from vtoken.scheduling.build import build_step
from vtoken.scheduling.step import Step
from vtoken.server.stats import StatsSource
from vtoken.vllm_plugin import compat
from vtoken.vllm_plugin.manager import VTokenManager
from vtoken.vllm_plugin.progress import ProgressGuard
from vtoken.vllm_plugin.settings import config_of
from vtoken.vllm_plugin.support import check_scheduler_supported


class VTokenSchedulerMixin:
    """Calls vToken's step around vLLM's scheduling.

    Attributes:
        vtoken: None where the config has no vToken settings.
    """

    vtoken: Step | None = None

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        compat.check_scheduler_side()
        config = config_of(self.vllm_config)
        self._vtoken_stats: StatsSource | None = None
        if config is None:
            return
        managers = self.kv_cache_manager.coordinator.single_type_managers
        check_scheduler_supported(self, managers)
        assert isinstance(managers[0], VTokenManager), type(managers[0])
        self.vtoken_reconfigure(config)
        self._vllm_allocate_slots = self.kv_cache_manager.allocate_slots
        # On the instance: allocate_slots does not tell the manager how many tokens are new.
        self.kv_cache_manager.allocate_slots = self._allocate_slots

    def vtoken_reconfigure(self, config: VTokenConfig, ops: TableOps | None = None) -> Step:
        """Start with these settings, or with other ones while no request is there.

        Args:
            ops: operations on token tables; None: compiled where that works.
        """
        manager = self.kv_cache_manager.coordinator.single_type_managers[0]
        self.vtoken = manager.step = build_step(
            config,
            scheduler=self,
            manager=manager,
            pool=self.kv_cache_manager.block_pool,
            ops=load_ops() if ops is None else ops,
            is_running=_is_running,
            model=self.vllm_config.model_config.model,
            num_engines=self.vllm_config.parallel_config.data_parallel_size,
        )
        if config.hash_kv_every:
            from vtoken.checks.scheduler_side import SchedulerChecker

            self.vtoken.checker = SchedulerChecker(self.vtoken, self.vllm_config)
        self._vtoken_progress = ProgressGuard(self)
        return self.vtoken

    def _allocate_slots(self, request, num_new_tokens, num_new_computed_tokens=0, *args, **kwargs):
        # Called for every running request of every step: nothing that is not needed.
        step = self.vtoken
        given = request, num_new_tokens, num_new_computed_tokens, *args
        if request.status is RequestStatus.RUNNING:
            if step.selector.waiting:
                step.on_allocate(request, num_new_tokens)
            blocks = self._vllm_allocate_slots(*given, **kwargs)
            if blocks is None and step.shortage.retry(request, num_new_tokens):
                blocks = self._vllm_allocate_slots(*given, **kwargs)
            if blocks is not None:
                step.clock.served.add(request.request_id)
            return blocks
        hits = kwargs.get("new_computed_blocks")
        hit_blocks = () if hits is None else hits.blocks[0]
        if not step.admission.admits(request, hit_blocks):
            return None
        blocks = self._vllm_allocate_slots(*given, **kwargs)
        if blocks is not None:
            step.clock.served.add(request.request_id)
            step.admission.admitted(request, hit_blocks)
        return blocks

    def add_request(self, request) -> None:
        if self.vtoken is not None and request.request_id not in self.requests:
            self.vtoken.arrive(request)
        super().add_request(request)

    def _reserve_prefill_lookahead(self, request, num_computed_tokens, num_new_tokens):
        # vLLM asks this of every request, running or waiting: the place to cut a chunk.
        n = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        if self.vtoken is None or n == 0:
            return n
        if n == 1 and request.status is RequestStatus.RUNNING and not request.is_prefill_chunk:
            return n  # it decodes
        return self.vtoken.cap_chunk(request, num_computed_tokens, n)

    def schedule(self, *args, **kwargs):
        if self.vtoken is None:
            return super().schedule(*args, **kwargs)
        self.vtoken.begin()
        output = super().schedule(*args, **kwargs)
        self._vtoken_progress.end_step()
        return output

    def _update_after_schedule(self, scheduler_output) -> None:
        if self.vtoken is not None:
            # An attribute of a plain dataclass: pickled with it to every worker.
            scheduler_output.vtoken = self.vtoken.finish(scheduler_output)
        super()._update_after_schedule(scheduler_output)

    def update_from_output(self, scheduler_output, model_runner_output):
        report = getattr(model_runner_output, "vtoken", None)
        if self.vtoken is not None and report is not None:
            self.vtoken.take_report(report)
            if self._vtoken_stats is not None:
                self._vtoken_stats.relocation_ns += report.relocation_ns
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self.vtoken is not None and self._vtoken_progress.refused:
            self._vtoken_progress.explain(outputs)
        return outputs

    def make_stats(self, *args, **kwargs):
        stats = super().make_stats(*args, **kwargs)
        if stats is not None and self.vtoken is not None:
            if self._vtoken_stats is None or self._vtoken_stats.step is not self.vtoken:
                self._vtoken_stats = StatsSource(self.vtoken)
            stats.num_kv_fetch_reqs_by_stage.update(self._vtoken_stats.take())
        return stats

    def _preempt_request(self, request, *args, **kwargs):
        super()._preempt_request(request, *args, **kwargs)
        if self.vtoken is not None:
            self.vtoken.counters.preemptions += 1
            self._vtoken_progress.note_preemption(request)


def _is_running(request) -> bool:
    return request.status is RequestStatus.RUNNING


class VTokenScheduler(VTokenSchedulerMixin, Scheduler):
    """For synchronous scheduling."""


class VTokenAsyncScheduler(VTokenSchedulerMixin, AsyncScheduler):
    """For asynchronous scheduling: a plain Scheduler there would be a large slowdown."""
