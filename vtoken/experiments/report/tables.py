"""Result rows as Rich tables: which fields, under which headings, with how many digits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

Row = Mapping[str, object]

AUTO = -1  # digits: as many as the number needs


class Column(NamedTuple):
    """A column of a table: field, heading, factor, digits; text where digits is None.

    Long text is cut, not wrapped, unless `wraps`.
    """

    key: str
    heading: str
    factor: float = 1.0
    digits: int | None = 1
    wraps: bool = False


def columns_of(*keys: str) -> list[Column]:
    """Columns headed by their fields' names, numbers as they are."""
    return [Column(key, key.removeprefix("vtoken_").replace("_", " "), digits=AUTO) for key in keys]


def cell(row: Row, column: Column) -> str:
    """A field as text."""
    value, digits = row.get(column.key), column.digits
    if value is None or value == "":
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if digits is None or not isinstance(value, (int, float)):
        return f"{value:g}" if isinstance(value, float) else str(value)
    if digits == AUTO:
        if isinstance(value, int):
            return f"{value:,}"
        return f"{value:,.4g}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{column.factor * value:,.{digits}f}"


def make_table(
    title: str,
    rows: Sequence[Row],
    columns: Sequence[Column],
    *,
    is_bold: Callable[[Row], bool] = lambda row: False,
):
    """A Rich table; text is on the left of its column, numbers on the right."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        is_text = column.digits is None
        table.add_column(
            column.heading, justify="left" if is_text else "right",
            no_wrap=is_text and not column.wraps,
        )  # fmt: skip
    for row in rows:
        style = "bold" if is_bold(row) else None
        table.add_row(*(cell(row, column) for column in columns), style=style)
    return table
