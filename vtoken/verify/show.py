"""A verification's findings as Rich tables."""

from __future__ import annotations

from rich.table import Table

from vtoken.verify.findings import MAX_LOGPROB_DIFF, Report, wrong_tokens


def show_report(report: Report, seconds: float) -> list[object]:
    """What people see: coverage, invariants, faults, quality, and one last line."""
    shown: list[object] = []
    if report.cells:
        shown.append(_coverage(report))
    if any(report.tally.events.values()):
        shown.append(_invariants(report))
    if report.cells:
        shown.append(_reference_line(report))
    if report.cost_ratio is not None:
        ratio = report.cost_ratio
        shown.append(f"Cost of the checks: {ratio:.2f} times the run without them.")
    if report.faults:
        shown.append(_faults(report))
    if report.quality is not None:
        shown += _quality(report.quality)
    if report.passed:
        shown.append(f"[green]passed[/green] in {seconds:.0f} s")
    else:
        shown.append(f"[red]failed[/red] in {seconds:.0f} s: " + "; ".join(report.failures()))
    return shown


def _table(title: str, texts: tuple[str, ...], numbers: tuple[str, ...] = ()) -> Table:
    """An empty table: columns of text, then of numbers."""
    table = Table(title=title)
    for name in texts:
        table.add_column(name)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def _coverage(report: Report) -> Table:
    table = _table(
        "Covered: all checks on, every output token against the masked reference",
        ("policy", "layout", "block", "prefix cache", "scheduling"),
        ("changes", "relocations", "moved", "tokens", "wrong", "max diff"),
    )
    for cell in sorted(report.cells, key=lambda c: (c.cell.policy, c.cell.layout)):
        r = cell.row()
        table.add_row(
            r["policy"], r["layout"], str(r["block_size"]), "on" if r["prefix_caching"] else "off",
            r["scheduling"], str(r["changes"]), str(r["relocation_events"]), str(r["moved_tokens"]),
            str(r["reference_tokens"]), str(r["mismatches"]), f"{r['max_abs_logprob_diff']:.1e}",
        )  # fmt: skip
    return table


def _invariants(report: Report) -> Table:
    table = _table("Invariants", ("name",), ("events", "violations"))
    for row in report.tally.rows():
        style = "red" if row["violations"] else None
        table.add_row(row["name"], f"{row['events']:,}", f"{row['violations']:,}", style=style)
    return table


def _reference_line(report: Report) -> str:
    total = report.reference
    line = (
        f"Masked reference: {total.tokens:,} tokens, {len(wrong_tokens(total))} wrong, largest "
        f"difference in log-probability {total.max_abs_logprob_diff:.1e}"
    )
    if report.sensitivity is not None:
        line += f" (one lost token would make {report.sensitivity:.1e})"
        if report.sensitivity < 2 * MAX_LOGPROB_DIFF:
            line += "; this model hardly notices a lost token, the comparison says little"
    return line + "."


def _faults(report: Report) -> Table:
    title = "Faults put into a real engine"
    table = _table(title, ("fault", "expected", "reported as", "detected"))
    for result in report.faults:
        row = result.row()
        table.add_row(
            row["name"], row["expected"], row["reported_as"] or "nothing",
            "yes" if row["detected"] else "NO", style=None if row["detected"] else "red",
        )  # fmt: skip
    return table


def _quality(quality: dict) -> list[object]:
    table = _table(
        f"vtoken against naive: {quality['policy']}, {quality['output_len']} tokens",
        ("decisions",),
        ("pairs", "identical", "mean ROUGE-L diff", "within 0.01", "length ratio"),
    )
    for kind in ("replayed", "free"):
        r = quality[kind]
        table.add_row(
            kind, str(r["pairs"]), f"{r['identical_frac']:.1%}", f"{r['mean_rouge_l_diff']:+.4f}",
            f"{r['within_0_01_frac']:.1%}", f"{r['median_length_ratio']:.2f}",
        )  # fmt: skip
    differing = [
        f"{pair['decisions']} {pair['request']}: first differs at token {pair['at']}, "
        f"{pair['explanation']}"
        for pair in quality["differing"][:8]
    ]
    return [table, *differing]
