"""Paired output quality: the same prompts under naive and under vtoken, text against text.

Both evict alike, so outputs should be equal; what differs is the order of float sums (another
layout) and, in free runs, what follows from a decision that a near-tie turned. Replayed runs give
vtoken exactly the decisions that naive recorded.

Every pair that differs is explained: at the first token that differs, the gap between the two
best logits of a masked reference that attends to what naive attended to.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from vtoken.config import VTokenConfig
from vtoken.engine.run import run_requests
from vtoken.engine.settings import EngineSettings
from vtoken.errors import ConfigError
from vtoken.units import cdiv
from vtoken.workloads.request import WorkloadRequest
from vtoken.workloads.texts import text_prompts

WITHIN = 0.01
NEAR_TIE = 1e-3  # logits of float32 models: sums in another order differ by about 1e-5
MAX_MEAN_DIFF = 0.0005
MIN_IDENTICAL = 0.99


@dataclass(frozen=True)
class Pair:
    """One prompt's two outputs, as vocabulary ids and as text, and the text that really followed.

    Attributes:
        reference_text: what ROUGE-L compares both with.
    """

    req_id: str
    naive_ids: list[int]
    vtoken_ids: list[int]
    naive_text: str
    vtoken_text: str
    reference_text: str

    @property
    def identical(self) -> bool:
        return self.naive_ids == self.vtoken_ids

    @property
    def first_difference(self) -> int:
        """Index of the first generated token that differs; the shorter length where none does."""
        for i, (a, b) in enumerate(zip(self.naive_ids, self.vtoken_ids, strict=False)):
            if a != b:
                return i
        return min(len(self.naive_ids), len(self.vtoken_ids))


def summarize(pairs: Sequence[Pair]) -> dict[str, object]:
    """Numbers over pairs; a difference is vtoken's ROUGE-L F1 less naive's."""
    scorer = rouge_scorer()
    diffs = []
    for p in pairs:
        naive, ours = (
            scorer.score(p.reference_text, text)["rougeL"].fmeasure
            for text in (p.naive_text, p.vtoken_text)
        )
        diffs.append(ours - naive)
    ratios = [len(p.vtoken_ids) / max(1, len(p.naive_ids)) for p in pairs]
    return {
        "pairs": len(pairs),
        "identical_frac": fmean(p.identical for p in pairs),
        "mean_rouge_l_diff": fmean(diffs),
        "within_0_01_frac": fmean(abs(d) <= WITHIN for d in diffs),
        "median_length_ratio": median(ratios),
    }


def rouge_scorer():
    """ROUGE-L.

    Raises:
        ConfigError: rouge-score is not installed.
    """
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise ConfigError(
            "--suite", "quality", "needs rouge-score: pip install 'vtoken[verify]'"
        ) from None
    return RougeScorer(["rougeL"], use_stemmer=False)


def continuation_prompts(
    tokenizer, num: int, prompt_len: int, output_len: int, seed: int = 0
) -> tuple[list[WorkloadRequest], list[str]]:
    """Prompts cut from texts, and the text that follows each."""
    whole = text_prompts(tokenizer, num, prompt_len + output_len, output_len=output_len, seed=seed)
    requests, follows = [], []
    for i, request in enumerate(whole):
        ids = request.prompt_token_ids
        requests.append(
            WorkloadRequest(
                request_id=f"quality-{i}", prompt_len=prompt_len, output_len=output_len,
                prompt_token_ids=ids[:prompt_len],
            )
        )  # fmt: skip
        follows.append(tokenizer.decode(ids[prompt_len:]))
    return requests, follows


def run_pairs(engine, config: VTokenConfig, requests, follows, folder: Path) -> dict[str, object]:
    """Run naive once, then vtoken with its decisions replayed, and free.

    Returns:
        {"replayed": pairs, "free": pairs, "trace": naive's trace, "num_evicted": naive's tokens}.
    """
    file = str(folder / f"decisions-{config.policy}.jsonl")
    runs = {}
    for name, changes in (
        ("naive", {"mode": "naive", "record_decisions": file, "trace": True}),
        ("replayed", {"mode": "vtoken", "replay_decisions": file}),
        ("free", {"mode": "vtoken"}),
    ):
        fields = config.model_dump(exclude_defaults=True) | changes
        engine.reconfigure(VTokenConfig.from_mapping(fields))
        engine.reset_prefix_cache()
        runs[name] = run_requests(
            engine, requests, max_concurrency=_num_at_once(engine, requests), ignore_eos=False
        ).finished
        if name == "naive":
            trace, num_evicted = list(engine.trace), engine.counters.evicted_tokens
    decode = engine.tokenizer.decode

    def pairs(name: str) -> list[Pair]:
        found = []
        for request, follow in zip(requests, follows, strict=True):
            a = runs["naive"][request.request_id].output_token_ids
            b = runs[name][request.request_id].output_token_ids
            found.append(Pair(request.request_id, a, b, decode(a), decode(b), follow))
        return found

    return {
        "replayed": pairs("replayed"), "free": pairs("free"), "trace": trace,
        "num_evicted": num_evicted,
    }  # fmt: skip


def _num_at_once(engine, requests: Sequence[WorkloadRequest]) -> int:
    """Requests that fit the pool with all their tokens: none is preempted, in no mode."""
    most = max(len(r.prompt_token_ids) + r.output_len for r in requests)
    return max(1, engine.num_usable_blocks // cdiv(most, engine.block_size))


def explain(model, pair: Pair, prompt_ids: Sequence[int], entries) -> dict[str, object]:
    """Say why a pair differs: the reference's two best logits at the first token that does.

    Args:
        model: from vtoken.verify.reference.load_reference.
        entries: naive's trace of this request.
    """
    at = pair.first_difference
    gap, best = _top_two(model, prompt_ids, pair.naive_ids, at, entries)
    row: dict[str, object] = {"request": pair.req_id, "at": at, "top2_logit_gap": gap}
    chosen = {ids[at] for ids in (pair.naive_ids, pair.vtoken_ids) if at < len(ids)}
    row["near_tie"] = gap <= NEAR_TIE and chosen <= set(best)
    kind = "a near-tie" if row["near_tie"] else "no near-tie"
    row["explanation"] = f"{kind}: the two best logits are {gap:.1e} apart"
    return row


def _top_two(model, prompt_ids, output_ids, at: int, entries) -> tuple[float, list[int]]:
    """Gap between the two best logits before generated token `at`, and their ids."""
    import torch

    from vtoken.verify.reference import attention_mask

    tokens = [*prompt_ids, *output_ids[:at]]
    last = max(e.num_preemptions for e in entries)
    entries = [e for e in entries if e.num_preemptions == last and e.first_id < len(tokens)]
    T = len(tokens)
    allowed = torch.from_numpy(attention_mask(T, entries)[:T, :T])
    mask = torch.zeros(T, T).masked_fill_(~allowed, torch.finfo(torch.float32).min)
    with torch.inference_mode():
        logits = model(
            input_ids=torch.tensor([tokens]), attention_mask=mask[None, None],
            position_ids=torch.arange(T)[None], use_cache=False, logits_to_keep=1,
        ).logits[0, -1]  # fmt: skip
    best = logits.float().topk(2)
    return float(best.values[0] - best.values[1]), best.indices.tolist()


def run_quality(
    base: dict[str, object],
    policies: Sequence[str],
    user: dict[str, object],
    *,
    num_pairs: int,
    output_len: int,
    model_path: str,
    prompt_len: int = 128,
    seed: int = 0,
    advance: Callable[[str], None] = lambda text: None,
) -> dict[str, object]:
    """The quality suite: pairs spread over policies; the contract's `quality` section and more.

    Args:
        base: EngineSettings fields. user: VTokenConfig fields that the user gave.
    """
    rouge_scorer()
    found: dict[str, list[Pair]] = {"replayed": [], "free": []}
    differing: list[dict[str, object]] = []
    idle: list[str] = []  # policies that evicted nothing: equal outputs show nothing
    fields = {
        "policy": policies[0],
        **{k: v for k, v in user.items() if k not in ("mode", "policy")},
    }
    settings = EngineSettings(**{"block_size": 16, "enable_prefix_caching": False, **base})
    from vtoken.engine import open_engine

    with (
        tempfile.TemporaryDirectory() as folder,
        open_engine(settings, VTokenConfig.from_mapping({**fields, "mode": "naive"})) as engine,
    ):
        requests, follows = continuation_prompts(
            engine.tokenizer, num_pairs, prompt_len, output_len, seed
        )
        for i, policy in enumerate(policies):
            mine = slice(i, None, len(policies))
            config = VTokenConfig.from_mapping({**fields, "policy": policy})
            result = run_pairs(engine, config, requests[mine], follows[mine], Path(folder))
            for kind in found:
                found[kind] += result[kind]
            if not result["num_evicted"]:
                idle.append(policy)
            differing += _explain_all(result, requests[mine], model_path)
            advance(policy)
    summary = {kind: summarize(pairs) for kind, pairs in found.items()}
    failures = _failures(summary["replayed"], differing)
    if idle:
        failures.append(f"nothing was evicted, so nothing was shown, for: {', '.join(idle)}")
    return {
        **summary, "policy": ", ".join(policies), "output_len": output_len,
        "prompt_len": prompt_len, "differing": differing, "failures": failures,
        "passed": not failures,
    }  # fmt: skip


def _explain_all(result: dict, requests: Sequence, model_path: str) -> list[dict[str, object]]:
    prompts = {r.request_id: r.prompt_token_ids for r in requests}
    wanted = [(k, p) for k in ("replayed", "free") for p in result[k] if not p.identical]
    if not wanted:
        return []
    from vtoken.verify.reference import load_reference

    model = load_reference(model_path)
    rows = []
    for kind, pair in wanted:
        # vLLM appends random characters to request ids inside the engine.
        entries = [e for e in result["trace"] if e.req_id.rsplit("-", 1)[0] == pair.req_id]
        rows.append({"decisions": kind, **explain(model, pair, prompts[pair.req_id], entries)})
    return rows


def _failures(replayed: dict, differing: Sequence[dict]) -> list[str]:
    wrong = []
    if replayed["identical_frac"] < MIN_IDENTICAL:
        wrong.append(f"only {replayed['identical_frac']:.1%} of the replayed pairs are identical")
    if abs(replayed["mean_rouge_l_diff"]) > MAX_MEAN_DIFF:
        wrong.append(f"mean ROUGE-L difference {replayed['mean_rouge_l_diff']:+.4f} when replayed")
    odd = [d["request"] for d in differing if d["decisions"] == "replayed" and not d["near_tie"]]
    if odd:
        wrong.append(f"replayed pairs differ without a near-tie: {', '.join(odd[:4])}")
    return wrong
