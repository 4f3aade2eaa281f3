"""Our kernels against the engine's own op: `vtoken.kernels.bench`, as rows of a profile."""

from __future__ import annotations

from collections.abc import Iterator

from vtoken.experiments.profile.rows import Row, Say, make_row


def run_kernels(say: Say, **options) -> Iterator[Row]:
    """Measure the suite; `options` are those of `vtoken.kernels.bench.rows`.

    Torch's number of threads is as before afterwards.
    """
    import torch

    from vtoken.kernels import bench

    num_threads = torch.get_num_threads()
    try:
        for row in bench.rows(**options):
            say(f"kernels, {row.name}")
            yield make_row(
                row.name, row.unit, value=row.value, ratio_to_stock=row.ratio_to_stock,
                num_threads=row.num_threads,
            )  # fmt: skip
    finally:
        torch.set_num_threads(num_threads)
