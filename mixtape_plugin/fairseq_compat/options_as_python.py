"""Options that fairseq evaluates as Python: of these values alone, so that no checkpoint's options run code."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from types import ModuleType

from mixtape_plugin.errors import UserError

# What literals lack: arithmetic of numbers and lists, as in "[(512, 3)] * 20". No powers, whose size knows no bound.
ARITHMETIC = re.compile(r"(?:\d[eE]|[\d\s.,()\[\]+/-]|\*(?!\s*\*)|True|False|None)*")


def evaluate_values_only() -> None:
    """Let fairseq's modules evaluate literals, and arithmetic of numbers and lists, in place of any Python.

    fairseq calls ``eval`` on strings among a model's, a task's, and a criterion's options. On the command line they are
    the user's own; but a checkpoint that is loaded names its architecture and all its options: `fconv`, say, would run
    what the file gives for ``encoder_layers``.
    """
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "fairseq" and calls_eval(module):
            module.eval = evaluate_value


def calls_eval(module: ModuleType) -> bool:
    """Whether a module's source has a call of the built-in ``eval``; a compiled module has none."""
    source = Path(getattr(module, "__file__", None) or "")
    return source.suffix == ".py" and re.search(rb"(?<![\w.])eval\(", source.read_bytes()) is not None


def evaluate_value(text: str) -> object:
    """The value of Python literals, or of arithmetic of numbers and lists; nothing else is evaluated.

    Raises:
        UserError: anything else.
    """
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        pass
    if ARITHMETIC.fullmatch(text):
        try:
            return eval(text, {"__builtins__": {}})
        except (ArithmeticError, SyntaxError, TypeError):
            pass
    raise UserError(
        f"the option {text[:80]!r}, which fairseq takes as Python, is not evaluated: allowed are numbers, strings, "
        "True, False, None, and tuples, lists and dictionaries of these"
    )
