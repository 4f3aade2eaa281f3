"""What is known of a running request, ours and vLLM's side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vtoken.core.planner import RequestState

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request


@dataclass(slots=True, kw_only=True)
class Running(RequestState):
    """RequestState of a request that holds blocks, from its first step until they are freed.

    Attributes:
        request: vLLM's.
        blocks: vLLM's row of it: the block manager's own list, which changes in place.
    """

    request: Request
    blocks: list[KVCacheBlock]
