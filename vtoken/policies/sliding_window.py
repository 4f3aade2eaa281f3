"""A recent window and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vtoken.errors import ConfigError
from vtoken.policies.streaming_llm import StreamingLLM


@dataclass(frozen=True, kw_only=True)
class SlidingWindow(StreamingLLM):
    """Keep the newest tokens, as many as the budget holds; drop the oldest.

    Source: "Longformer: The Long-Document Transformer", Beltagy, Peters, Cohan, 2020, where each
    layer attends to a fixed number of the last tokens; no default carries over, the window is the
    budget.

    What differs here: the window is imposed on a model trained with full attention, and the
    dropped KV is gone for every layer and head alike, because vLLM's block table is shared by
    them. In a model trained with windows each layer would still reach further back through the
    layer below.

    Raises:
        ConfigError: `sink_tokens` above 0; sinks and a window are streaming-llm.
    """

    name: ClassVar[str] = "sliding-window"

    sink_tokens: int = 0

    def __post_init__(self) -> None:
        if self.sink_tokens:
            raise ConfigError(
                "--sink-tokens",
                self.sink_tokens,
                "0, for sliding-window keeps no sinks; sinks and a window are --policy streaming-llm",
            )
