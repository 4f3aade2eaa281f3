"""Our kernels against the engine's own op: `vtoken.kernels.bench`, as rows of a profile."""

from __future__ import annotations

from collections.abc import Iterator

from vtoken.experiments.profile.rows import Row, Say, make_row


def run_kernels(say: Say, **options) -> list[Row]:
    """Measure the suite; `options` are those of `vtoken.kernels.bench.rows`.

    Torch's number of threads is as before afterwards.
    """
    import torch

    num_threads = torch.get_num_threads()
    try:
        return list(_rows(say, options))
    finally:
        torch.set_num_threads(num_threads)


def _rows(say: Say, options: dict) -> Iterator[Row]:
    from vtoken.kernels import bench

    for row in bench.rows(**options):
        say(f"kernels, {row.name}")
        yield make_row(
            row.name, row.unit, value=row.value, ratio_to_stock=row.ratio_to_stock,
            num_threads=row.num_threads,
        )  # fmt: skip
