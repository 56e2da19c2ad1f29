"""Markdown pages with tables that a command makes: <!-- collect_results.py ARGUMENTS --> … <!-- end -->."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from mixtape_plugin.errors import UserError

BLOCK = "<!-- collect_results.py "
WITHIN = rf"((?:(?!^{re.escape(BLOCK)}).)*?)"  # not beyond the next block: an end may be missing
BLOCK_PATTERN = re.compile(rf"(^{re.escape(BLOCK)}{WITHIN} -->\r?\n){WITHIN}(<!-- end -->)", re.DOTALL | re.MULTILINE)


def blocks_of(path: Path, text: str) -> dict[int, list[str]]:
    """The arguments of each block of a page, by the block's place in the text.

    Raises:
        UserError: there is no block, one has no end, or what it has is no list of arguments.
    """
    openings = len(re.findall(rf"^{re.escape(BLOCK)}", text, re.MULTILINE))
    blocks = list(BLOCK_PATTERN.finditer(text))
    if not blocks or len(blocks) < openings:
        raise UserError(
            f"--page {path} has {openings} times {BLOCK!r} and {len(blocks)} whole blocks, "
            f"{BLOCK}ARGUMENTS --> … <!-- end -->"
        )
    arguments = {}
    for block in blocks:
        try:
            arguments[block.start()] = shlex.split(block[2])
        except ValueError as error:
            raise UserError(f"--page {path}: {block[2]!r} is no list of arguments: {error}") from None
    return arguments


def filled(text: str, tables: dict[int, str]) -> str:
    """A page's text with other tables, which are given by the places of their blocks."""
    return BLOCK_PATTERN.sub(lambda block: f"{block[1]}\n{tables[block.start()]}{block[4]}", text)
