"""Engines in the middle of their work: a given number of requests, each one decoding."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager

from vtoken.engine import EngineSettings, StepEngine, open_engine
from vtoken.errors import ConfigError
from vtoken.experiments.profile.profile_options import ProfileSettings
from vtoken.workloads.synthetic import random_prompts

MAX_PREFILL_STEPS = 10_000


def staggered(num: int, prompt_len: int, block_size: int) -> list[int]:
    """Prompt lengths spread over a block, so that requests evict in different steps."""
    return [prompt_len + i * block_size // num for i in range(num)]


def start_requests(
    engine: StepEngine, num: int, prompt_len: int, output_len: int, *, tag: str, seed: int = 0
) -> list[str]:
    """Submit requests and step until each of them decodes.

    Args:
        tag: begins the requests' names; another one for every call on an engine.

    Returns:
        Their names.
    """
    engine.reset_prefix_cache()  # the prompts are the same every time: no hits from earlier ones
    vocabulary = engine.vllm_config.model_config.get_vocab_size()
    names = [f"{tag}-{i}" for i in range(num)]
    for i, length in enumerate(staggered(num, prompt_len, engine.block_size)):
        prompt = random_prompts(1, length, output_len, vocab_size=vocabulary, seed=seed, repeat=i)
        engine.add(names[i], prompt[0].prompt_token_ids, output_len)
    for _ in range(MAX_PREFILL_STEPS):
        engine.step()
        running = engine.scheduler.running
        if len(running) == num and all(r.num_output_tokens for r in running):
            return names
        if not engine.has_unfinished():
            break
    pool = f"{engine.num_usable_blocks} blocks of {engine.block_size} tokens"
    raise ConfigError("--num-kv-blocks", pool, f"room for {num} requests of {prompt_len} tokens")


def stop_requests(engine: StepEngine, names: list[str]) -> None:
    """End these requests early, and leave the engine idle."""
    engine.abort(names)
    while engine.has_unfinished():
        engine.step()
    assert not engine.check_idle(), engine.check_idle()


class Engines:
    """Real engines side by side in one process, closed together.

    vLLM keeps its process groups per process and tears them down with the first engine that is
    closed, so none is closed before the last step of all.
    """

    def __init__(
        self, settings: EngineSettings, open_engine: Callable[..., StepEngine] = open_engine
    ) -> None:
        self.settings, self._open = settings, open_engine
        self._engines: dict[str, StepEngine] = {}

    def get(self, name: str, config) -> StepEngine:
        """The idle engine of this name, with these settings; opened at first use."""
        engine = self._engines.get(name)
        if engine is None:
            engine = self._engines[name] = self._open(self.settings, config)
        elif config is not None and config.hooks_installed:
            engine.reconfigure(config)
        return engine

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()


@contextmanager
def side_by_side(profile: ProfileSettings, concurrency: int, num_tokens: int):
    """Engines with room for so many requests, closed at the end whatever happens."""
    engines = Engines(profile.engine_settings(concurrency, num_tokens))
    try:
        yield engines
    finally:
        engines.close()
