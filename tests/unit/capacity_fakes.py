"""An engine made of a few numbers, to test the logic of scans without vLLM."""

from __future__ import annotations

from types import SimpleNamespace

from vtoken.core.counters import Counters
from vtoken.engine import FinishedRequest, StepEngine
from vtoken.experiments.capacity.pools import Host
from vtoken.experiments.planning.model_shapes import ModelShape
from vtoken.units import cdiv
from vtoken.workloads import WorkloadRequest

SHAPE = ModelShape(
    name="fake", architecture="LlamaForCausalLM", num_layers=2, hidden_size=64, num_heads=4,
    num_kv_heads=2, head_size=16, intermediate_size=128, vocab_size=1000, tied_embeddings=True,
    num_params=200_000, max_model_len=4096, dtype="float32",
)  # fmt: skip
HOST = Host(
    is_cpu=True, memory_bytes=2**24, process_bytes=2**20, block_size=32, max_batched_tokens=2048
)


class FakeClock:
    """A clock that only engines move."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    perf_counter = __call__  # stands in for the module `time` in vtoken.engine.run


class FakeScheduler:
    """Every running request gets its prompt, then a token a step; the last one is preempted."""

    def __init__(self, num_blocks: int, block_size: int, keeps_frac: float, max_seqs: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.keeps_frac, self.max_seqs = keeps_frac, max_seqs
        self.running: list = []
        self.waiting: list = []

    def blocks_of(self, num_tokens: int) -> int:
        return cdiv(int(num_tokens * self.keeps_frac), self.block_size)

    @property
    def num_used_blocks(self) -> int:
        return sum(self.blocks_of(r.num_computed_tokens) for r in self.running)

    def schedule(self):
        counts = {}
        for request in list(self.running):
            if request in self.running:  # else it was preempted for one before it
                self._grow(request, counts)
        while self.waiting and len(self.running) < self.max_seqs:
            request = self.waiting[0]
            if self.num_used_blocks + self.blocks_of(request.prompt_len) > self.num_blocks:
                break
            self.running.append(self.waiting.pop(0))
            counts[request.request_id] = request.prompt_len
            request.num_computed_tokens = request.prompt_len
        return SimpleNamespace(
            num_scheduled_tokens=counts, total_num_scheduled_tokens=sum(counts.values())
        )

    def _grow(self, request, counts: dict) -> None:
        request.num_computed_tokens += 1
        while self.num_used_blocks > self.num_blocks:
            victim = self.running.pop()
            counts.pop(victim.request_id, None)
            self._preempt_request(victim)
            if victim is request:
                return
        counts[request.request_id] = 1

    def _preempt_request(self, request) -> None:
        request.num_computed_tokens = 0
        self.waiting.insert(0, request)


class FakeEngine(StepEngine):
    """See `FakeWorld`, which makes them."""

    hooks = None

    def __init__(self, world: FakeWorld, settings, config) -> None:
        self.world, self.settings, self.config = world, settings, config
        self.block_size, self.num_usable_blocks = settings.block_size, settings.num_kv_blocks
        self.counter_values = Counters()
        self._make_scheduler()
        self.prompts_seen: list[tuple[int, ...]] = []
        self.num_resets = 0
        self.is_closed = False

    def _make_scheduler(self) -> None:
        keeps = self.world.keeps_frac[self.config.mode]
        seqs = min(self.settings.max_num_seqs, self.world.max_resident)
        self.scheduler = FakeScheduler(self.num_usable_blocks, self.block_size, keeps, seqs)

    @property
    def counters(self) -> Counters:
        return self.counter_values

    def reconfigure(self, config) -> None:
        assert "native" not in (config.mode, self.config.mode)
        self.config = config
        self._make_scheduler()
        self.world.log.append(f"reconfigure {config.mode}")

    def add(self, req_id, prompt_token_ids, max_tokens, **_) -> None:
        assert len(prompt_token_ids) + max_tokens <= self.settings.max_model_len
        self.prompts_seen.append(tuple(prompt_token_ids))
        self.scheduler.waiting.append(
            SimpleNamespace(
                request_id=req_id, prompt_len=len(prompt_token_ids), max_tokens=max_tokens,
                num_computed_tokens=0, num_output_tokens=0,
            )
        )  # fmt: skip

    def step(self):
        self.world.on_step(self)
        output = self.scheduler.schedule()
        new, finished = {}, []
        for request in list(self.scheduler.running):
            if request.request_id not in output.num_scheduled_tokens:
                continue
            new[request.request_id] = 1
            request.num_output_tokens += 1
            if request.num_output_tokens == request.max_tokens:
                self.scheduler.running.remove(request)
                finished.append(FinishedRequest(request.request_id, [], [], [], "length"))
        self.counter_values.evicted_tokens += len(new) if self.config.evicts else 0
        if self in self.world.real:
            self.world.clock.now_s += self.world.step_s[self.config.mode]
        return new, finished

    def abort(self, req_ids) -> None:
        s = self.scheduler
        s.running = [r for r in s.running if r.request_id not in req_ids]
        s.waiting = [r for r in s.waiting if r.request_id not in req_ids]

    def has_unfinished(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def reset_prefix_cache(self) -> None:
        self.num_resets += 1

    def num_used_blocks(self) -> int:
        return self.scheduler.num_used_blocks

    def check_idle(self) -> list[str]:
        return ["blocks are left"] if self.world.leaks else []

    def close(self) -> None:
        self.is_closed = True


class FakeWorld:
    """Makes fake engines and remembers what was done with them.

    Attributes:
        keeps_frac: share of its tokens that a request holds, by mode.
        step_s, load_s: seconds on the fake clock; dry engines take none.
        max_resident: most requests an engine admits.
        real, dry: engines made, in order; log: their life.
    """

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.keeps_frac = {"native": 1.0, "indirection": 1.0, "naive": 1.0, "vtoken": 0.53}
        self.step_s = dict.fromkeys(self.keeps_frac, 0.0)
        self.load_s, self.max_resident, self.leaks = 0.0, 10**9, False
        self.real: list[FakeEngine] = []
        self.dry: list[FakeEngine] = []
        self.log: list[str] = []
        self.on_step = lambda engine: None

    def open_engine(self, settings, config) -> FakeEngine:
        self.clock.now_s += self.load_s
        self.log.append(f"open {config.mode}")
        assert all(engine.is_closed for engine in self.real), "two engines at once"
        self.real.append(FakeEngine(self, settings, config))
        return self.real[-1]

    def open_dry_engine(self, settings, config, score_source=None) -> FakeEngine:
        self.dry.append(FakeEngine(self, settings, config))
        return self.dry[-1]


def make_requests(num: int, repeat: int, prompt_len: int, output_len: int):
    """Requests whose prompts spell (repeat, index)."""
    return [
        WorkloadRequest(
            request_id=f"r{repeat}-{i}", prompt_len=prompt_len, output_len=output_len,
            prompt_token_ids=[repeat, i] + [0] * (prompt_len - 2),
        )
        for i in range(num)
    ]  # fmt: skip
