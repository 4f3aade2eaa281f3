"""Fill in what a policy must know of the model's vocabulary.

A policy that tells special tokens or punctuation apart has the fields `special_ids` and
`punctuation_ids`. They are filled where the config is finished, in the front end: the scheduler
and the workers, in whatever process, then build the same policy from the same settings.
"""

from __future__ import annotations

import logging
from dataclasses import fields

from vtoken.config import VTokenConfig
from vtoken.policies.fastgen import punctuation_ids
from vtoken.policies.registry import policy_class

logger = logging.getLogger("vllm.vtoken")


def with_vocabulary(config: VTokenConfig, model_config) -> VTokenConfig:
    """Add the vocabulary ids that the policy has fields for and the user left out.

    Args:
        model_config: vLLM's; without a tokenizer (`skip_tokenizer_init`) nothing is added.
    """
    if not config.evicts:
        return config
    known = {f.name for f in fields(policy_class(config.policy))}
    missing = ({"special_ids", "punctuation_ids"} & known) - config.policy_args.keys()
    if not missing:
        return config
    tokenizer = _load_tokenizer(model_config)
    if tokenizer is None:
        logger.warning(
            "Policy %s knows no %s: the engine has no tokenizer.",
            config.policy, " or ".join(sorted(missing)),
        )  # fmt: skip
        return config
    found = {
        "special_ids": sorted(set(tokenizer.all_special_ids)),
        "punctuation_ids": list(punctuation_ids(tokenizer.get_vocab())),
    }
    args = {**config.policy_args, **{name: found[name] for name in sorted(missing)}}
    return config.model_copy(update={"policy_args": args})


def _load_tokenizer(model_config):
    from vllm.tokenizers import cached_tokenizer_from_config

    try:
        return cached_tokenizer_from_config(model_config)
    except (OSError, ValueError) as error:
        logger.warning("No tokenizer for the policy: %s", error)
        return None
