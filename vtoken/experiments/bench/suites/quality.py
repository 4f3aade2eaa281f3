"""Quality suite: what eviction costs in answers, per task, policy and budget, against full KV.

Paper: section 5.8 and Table 2 compare vToken with naive (that is `vtoken verify --suite quality`);
what a budget itself costs it leaves to the policies. This suite asks that: needle, key-value and
line retrieval, and questions over several documents. Both modes evict alike, so one of them runs.

Rows: accuracy (an accepted answer is in the output), ROUGE-L F1 of the output against full KV's
for the same prompt, and how many outputs are the same. `safe_budget_frac` is the smallest share
of tokens kept from which on every measured budget is within 2 points of full KV.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from vtoken.errors import ConfigError
from vtoken.experiments.bench.bench_options import DEFAULT_RATIOS, Case
from vtoken.experiments.bench.context import Context, SuiteResult
from vtoken.experiments.bench.measure import Record, measure
from vtoken.experiments.bench.named_workloads import Workload
from vtoken.experiments.bench.open_engines import Pool, Session
from vtoken.experiments.bench.paired_outputs import rouge_scorer
from vtoken.experiments.bench.pairing import Comparison
from vtoken.experiments.bench.suites.questions import MADE, Task, make_task
from vtoken.workloads.retrieval import answered

PAPER = "section 5.8, Table 2; budgets after the policies' own papers"
DEFAULT_POLICIES = ("h2o", "scissorhands", "snapkv", "streaming-llm", "random")
NUM_QUESTIONS = 10
BATCH = 4
WITHIN_POINTS = 2.0


def run_quality(context: Context, result: SuiteResult) -> None:
    """Run the suite, into the result."""
    rouge_scorer()  # refused before anything is measured
    settings = context.settings
    num = settings.num_requests or NUM_QUESTIONS
    names = [w for w in settings.workloads if w in MADE or "/" in w or "." in w]
    if settings.workloads and not names and settings.suites == ("quality",):
        names = list(settings.workloads)  # make_task says what is wrong with them
    tasks = [
        make_task(
            name, context.tokenizer(), num, prompt_len=settings.prompt_len,
            output_len=settings.output_len, seed=settings.engine.seed, max_len=context.max_len,
        )
        for name in names or MADE
    ]  # fmt: skip
    _check_names(tasks)
    result.notes += [task.note for task in tasks if task.note]
    longest = max(task.max_tokens for task in tasks)
    context.check_length(longest)
    cases = _cases(context)
    at_once = max(settings.points or (BATCH,))
    with context.session(max_tokens=longest, max_num_seqs=at_once) as session:
        runner = QuestionRunner(context, session, context.ample_pool(at_once, longest), at_once)
        runner.progress.plan(
            sum(len(cases) * sum(r.output_len for r in task.requests) for task in tasks)
        )
        for task in tasks:
            try:
                for row in _task_rows(runner, task, cases):
                    result.rows.append(row)
            finally:  # after Ctrl-C: of the budgets there are
                _add_safe_budgets(result.rows)


def _check_names(tasks: Sequence[Task]) -> None:
    """Refuse two tasks of one name: the journal would give one the answers of the other."""
    names = [task.name for task in tasks]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError("--workload", name, "every task once, and files of different names")


def _cases(context: Context) -> list[Case]:
    """Full KV first, then every policy at every budget, the largest budget first."""
    settings = context.settings
    full = "native" if "native" in settings.modes else "indirection"
    mode = "vtoken" if "vtoken" in settings.modes else "naive"
    if mode not in settings.modes:
        raise ConfigError("--mode", ",".join(settings.modes), "naive or vtoken among them")
    found = [Case(mode=full)]
    for policy in context.policies(DEFAULT_POLICIES):
        if settings.config.kv_budget_tokens is not None:
            found.append(Case(mode=mode, policy=policy))
            continue
        for ratio in sorted(settings.ratios or DEFAULT_RATIOS):
            found.append(Case(mode=mode, policy=policy, changes={"eviction_ratio": ratio}))
    return found


class QuestionRunner:
    """Asks the questions of a task in one case."""

    def __init__(self, context: Context, session: Session, pool: Pool, at_once: int) -> None:
        self.context, self.session, self.pool, self.at_once = context, session, pool, at_once
        self.progress = context.runner(session)

    def run(self, task: Task, case: Case) -> Record:
        """The record, with outputs as `texts`; from the journal where it has it."""
        comparison = Comparison(
            suite="quality",
            workload=Workload(
                name=task.name, make=lambda num, repeat: task.requests, max_tokens=task.max_tokens
            ),
            pool=self.pool, cases=[case], num_requests=len(task.requests),
            max_concurrency=self.at_once, repeats=1,
        )  # fmt: skip
        key = comparison.key(case, 0)
        record = self.context.journal.get(key)
        if record is None:
            engine = self.session.get(case, self.pool)
            record = measure(
                engine, task.requests, max_concurrency=self.at_once, ignore_eos=False, timed=False
            )
            decode = self.context.tokenizer().decode
            record.values["texts"] = [
                decode(record.outputs[r.request_id], skip_special_tokens=True)
                for r in task.requests
            ]
            self.context.journal.put(key, record)
        self.progress.note_done(
            sum(r.output_len for r in task.requests), f"{task.name}, {case.key}"
        )
        return record


def _task_rows(runner: QuestionRunner, task: Task, cases: Sequence[Case]) -> Iterator[dict]:
    full_case, *others = cases
    full = runner.run(task, full_case)
    yield _row(task, full_case, full, full, 1.0)
    for case in others:
        record = runner.run(task, case)
        ratio = case.changes.get("eviction_ratio")
        budget = _kept_frac(runner, task) if ratio is None else 1 - ratio
        yield _row(task, case, record, full, budget)


def _kept_frac(runner: QuestionRunner, task: Task) -> float:
    """Share of a prompt that an absolute budget keeps, on average."""
    tokens = runner.context.settings.config.kv_budget_tokens
    return fmean(min(1.0, tokens / r.prompt_len) for r in task.requests)


def _row(task: Task, case: Case, record: Record, full: Record, budget: float) -> dict:
    texts, full_texts = record.values["texts"], full.values["texts"]
    scorer = rouge_scorer()
    rouge = [
        scorer.score(reference, text)["rougeL"].fmeasure if reference.strip() else 1.0
        for reference, text in zip(full_texts, texts, strict=True)
    ]
    values = {k: v for k, v in record.values.items() if k != "texts"}
    return {
        "mode": case.mode,
        "policy": case.policy,
        "workload": task.name,
        "task": task.name,
        **case.changes,
        "budget_frac": round(budget, 6),
        "accuracy": _accuracy(task, texts),
        "full_kv": _accuracy(task, full_texts),
        "mean_rouge_l": fmean(rouge),
        "identical_frac": fmean(a == b for a, b in zip(texts, full_texts, strict=True)),
        "num_questions": len(texts),
        "prompt_tokens": round(fmean(r.prompt_len for r in task.requests)),
        **values,
    }


def _accuracy(task: Task, texts: Sequence[str]) -> float:
    return fmean(answered(t, r.answers) for t, r in zip(texts, task.requests, strict=True))


def _add_safe_budgets(rows: list[dict]) -> None:
    """Put the safe budget of its (task, policy) into every row that evicts."""
    for row in rows:
        if row["policy"]:
            group = [r for r in rows if (r["task"], r["policy"]) == (row["task"], row["policy"])]
            row["safe_budget_frac"] = safe_budget(group)


def safe_budget(rows: Sequence[dict]) -> float | None:
    """The smallest budget from which on all are within 2 points of full KV; None: no budget is."""
    safe = None
    for row in sorted(rows, key=lambda r: -r["budget_frac"]):
        if 100 * (row["full_kv"] - row["accuracy"]) > WITHIN_POINTS + 1e-9:
            break
        safe = row["budget_frac"]
    return safe


def sentences(rows: list[dict]) -> list[str]:
    """Which budget is safe, per task and policy; and where full KV itself cannot answer."""
    lines = []
    for task in dict.fromkeys(row["task"] for row in rows):
        group = [row for row in rows if row["task"] == task]
        full = group[0]["full_kv"]
        head = f"{task} (full KV {100 * full:.0f} % of {group[0]['num_questions']} questions): "
        if full == 0:
            lines.append(f"{head}the model cannot answer with full KV, so no budget can be judged.")
            continue
        found = []
        for policy in dict.fromkeys(row["policy"] for row in group if row["policy"]):
            safe = safe_budget([r for r in group if r["policy"] == policy])
            text = "no measured budget" if safe is None else f"{100 * safe:.0f} %"
            found.append(f"{policy} {text}")
        if not found:
            lines.append(f"{head}no budget was measured.")
            continue
        lines.append(f"{head}smallest safe budget: {', '.join(found)}.")
    return lines
