"""Tables of strings: in Markdown, and as lines of text."""

from __future__ import annotations

from typing import Iterable, Sequence


def table(header: Sequence[str], lines: Iterable[Sequence[str]], text_columns: int | None = None) -> str:
    """A Markdown table; the columns after the first ``text_columns`` are to the right, none where it is None."""
    left = len(header) if text_columns is None else text_columns
    rows = [header, ["---"] * left + ["--:"] * (len(header) - left), *lines]
    return "".join("| " + " | ".join(value.replace("|", "\\|") for value in row) + " |\n" for row in rows)


def aligned(rows: Sequence[Sequence[str]], text_columns: int = 0) -> str:
    """Lines of text, their columns below each other; the first ``text_columns`` are to the left."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        "  ".join(
            value.ljust(width) if place < text_columns else value.rjust(width)
            for place, (value, width) in enumerate(zip(row, widths))
        )
        for row in rows
    )
