"""vLLM's two schedulers with vToken's hooks in them.

The mixin only calls `SchedulerHooks`; what is decided lives there and in vtoken.core.
"""

from __future__ import annotations

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from vtoken.server.stats import StatsSource
from vtoken.vllm_plugin import compat
from vtoken.vllm_plugin.hooks import SchedulerHooks
from vtoken.vllm_plugin.manager import VTokenManager
from vtoken.vllm_plugin.sizing import config_of
from vtoken.vllm_plugin.support import check_scheduler_supported


class VTokenSchedulerMixin:
    """Adds planning, transport and bookkeeping around vLLM's scheduling."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        compat.check_scheduler_side()
        config = config_of(self.vllm_config)
        self.vtoken: SchedulerHooks | None = None
        self._vtoken_stats: StatsSource | None = None
        if config is None:
            return
        managers = self.kv_cache_manager.coordinator.single_type_managers
        check_scheduler_supported(self, managers)
        manager = managers[0]
        assert isinstance(manager, VTokenManager), type(manager)
        self.vtoken = manager.hooks = SchedulerHooks(config, self, manager)
        self._vllm_allocate_slots = self.kv_cache_manager.allocate_slots
        # On the instance: allocate_slots does not tell the manager how many tokens are new.
        self.kv_cache_manager.allocate_slots = self._allocate_slots

    def _allocate_slots(self, request, num_new_tokens, num_new_computed_tokens=0, *args, **kwargs):
        # Called for every running request of every step: nothing that is not needed.
        hooks = self.vtoken
        if hooks.plans:
            hooks.note_allocation(num_new_tokens)
        if request.status is RequestStatus.RUNNING:
            blocks = self._vllm_allocate_slots(
                request, num_new_tokens, num_new_computed_tokens, *args, **kwargs
            )
            if blocks is None and hooks.pressure.retry(request, num_new_tokens):
                hooks.note_allocation(num_new_tokens)
                blocks = self._vllm_allocate_slots(
                    request, num_new_tokens, num_new_computed_tokens, *args, **kwargs
                )
            if blocks is not None:
                hooks.pressure.allocated.add(request.request_id)
            return blocks
        hits = kwargs.get("new_computed_blocks")
        hit_blocks = () if hits is None else hits.blocks[0]
        if not hooks.admission.admits(request, hit_blocks):
            return None
        blocks = self._vllm_allocate_slots(
            request, num_new_tokens, num_new_computed_tokens, *args, **kwargs
        )
        if blocks is not None:
            hooks.pressure.allocated.add(request.request_id)
            hooks.admission.admitted(request, hit_blocks)
        return blocks

    def add_request(self, request) -> None:
        if self.vtoken is not None and request.request_id not in self.requests:
            self.vtoken.arrive(request)
        super().add_request(request)

    def _reserve_prefill_lookahead(self, request, num_computed_tokens, num_new_tokens):
        # vLLM asks this of every request, running or waiting: the place to cut a chunk.
        n = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        if self.vtoken is None or (n <= 1 and not request.is_prefill_chunk):
            return n
        return self.vtoken.cap_chunk(request, num_computed_tokens, n)

    def schedule(self, *args, **kwargs):
        if self.vtoken is not None:
            self.vtoken.begin_step()
        return super().schedule(*args, **kwargs)

    def _update_after_schedule(self, scheduler_output) -> None:
        if self.vtoken is not None:
            # An attribute of a plain dataclass: pickled with it to every worker.
            scheduler_output.vtoken = self.vtoken.finalize(scheduler_output)
        super()._update_after_schedule(scheduler_output)

    def update_from_output(self, scheduler_output, model_runner_output):
        report = getattr(model_runner_output, "vtoken", None)
        if self.vtoken is not None and report is not None:
            if report.scores is not None:
                self.vtoken.take_scores(report.scores)
            if self._vtoken_stats is not None:
                self._vtoken_stats.relocation_ns += report.relocation_ns
            if self.vtoken.checker is not None:
                self.vtoken.checker.note_worker(report.check_counts)
        return super().update_from_output(scheduler_output, model_runner_output)

    def make_stats(self, *args, **kwargs):
        stats = super().make_stats(*args, **kwargs)
        if stats is not None and self.vtoken is not None:
            if self._vtoken_stats is None or self._vtoken_stats.hooks is not self.vtoken:
                self._vtoken_stats = StatsSource(self.vtoken)
            stats.num_kv_fetch_reqs_by_stage.update(self._vtoken_stats.take())
        return stats

    def _preempt_request(self, request, *args, **kwargs):
        if self.vtoken is not None:
            self.vtoken.counters.preemptions += 1
        return super()._preempt_request(request, *args, **kwargs)


class VTokenScheduler(VTokenSchedulerMixin, Scheduler):
    """For synchronous scheduling."""


class VTokenAsyncScheduler(VTokenSchedulerMixin, AsyncScheduler):
    """For asynchronous scheduling: a plain Scheduler there would be a large slowdown."""
