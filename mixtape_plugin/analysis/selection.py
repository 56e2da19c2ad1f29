"""Which trainings --where, --without and --ended of scripts/collect_results.py ask for."""

from __future__ import annotations

import re
from typing import Sequence

from mixtape_plugin.analysis.results import words_of
from mixtape_plugin.errors import UserError


def has(command: str, text: str) -> bool:
    """Whether the command has the text, whose last word or number must not go on there: --lr 4 is not in --lr 40.

    The command is taken as a shell reads it, so that 416,140 is there where the log has 416\\,140.
    """
    end = r"(?!\w|\.\d)" if re.search(r"\w$", text) else ""
    return bool(re.search(re.escape(text) + end, " ".join(words_of(command))))


def chosen(text: str, where: Sequence[str], without: Sequence[str]) -> bool:
    """Whether the text has all of ``where`` and none of ``without``."""
    return all(has(text, part) for part in where) and not any(has(text, part) for part in without)


def asked_for(rows: Sequence[dict], where: Sequence[str], without: Sequence[str], ended: bool) -> list[dict]:
    """The trainings whose commands have all of ``where`` and none of ``without``, with ``ended`` those that ended.

    Raises:
        UserError: none is left.
    """
    rows = [row for row in rows if all(has(row["command"], text) for text in where)]
    if not rows:
        raise UserError(f"--where {' '.join(where)} is in no training's command")
    rows = [row for row in rows if not any(has(row["command"], text) for text in without)]
    if not rows:
        raise UserError(f"--without {' '.join(without)} leaves no training: each command has one of these")
    rows = [row for row in rows if row["ended"] == "yes" or not ended]
    if not rows:
        raise UserError("--ended leaves no training: none came to its end")
    return rows
