"""Options that fairseq evaluates as Python: of these values alone, so that no checkpoint's options run code."""

from __future__ import annotations

import ast
import inspect
import re
import sys

from mixtape_plugin.errors import UserError

# What literals lack: sums and multiples of lists, as in "[(512, 3)] * 20". No powers, whose size knows no bound.
ARITHMETIC = re.compile(r"(?:[\d\s.,()\[\]+-]|\*(?!\s*\*)|True|False|None)*")


def evaluate_values_only() -> None:
    """Let fairseq's modules evaluate literals, and sums and multiples of numbers and lists, in place of any Python.

    fairseq calls ``eval`` on strings among a model's, a task's, and a criterion's options. On the command line they are
    the user's own; but a checkpoint that is loaded names its architecture and all its options: `fconv`, say, would run
    what the file gives for ``encoder_layers``.
    """
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "fairseq" and calls_eval(module):
            module.eval = evaluate_value


def calls_eval(module: object) -> bool:
    """Whether a module's source has a call of the built-in ``eval``."""
    try:
        return re.search(r"(?<![\w.])eval\(", inspect.getsource(module)) is not None
    except (OSError, TypeError):  # no source: a compiled one
        return False


def evaluate_value(text: str) -> object:
    """The value of Python literals, or of sums and multiples of numbers and lists; nothing else is evaluated.

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
        f"the option {text[:80]!r} is not evaluated: fairseq takes it as Python: only numbers, strings, True, False "
        "and None, and tuples, lists and dictionaries of these, are allowed"
    )
