"""Options that fairseq evaluates as Python: of these values alone, so that no checkpoint's options run code."""

from __future__ import annotations

import ast
import operator
import re
import sys
from pathlib import Path
from types import ModuleType

from mixtape_plugin.errors import UserError

# What literals lack: arithmetic of numbers and lists, as in "[(512, 3)] * 20". No powers, whose size knows no bound.
ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
SIGNS = {ast.UAdd: operator.pos, ast.USub: operator.neg}
LONGEST = 10_000  # elements of a list that is repeated: such an option has one for each layer


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
    if not isinstance(text, str):
        raise TypeError("eval() arg 1 must be a string")  # as the built-in has it, which fairseq's eval_bool catches
    try:
        return value_of(ast.parse(text.strip(), mode="eval").body)
    except (ValueError, SyntaxError, TypeError, ArithmeticError, RecursionError, MemoryError):  # the last two: too deep
        raise UserError(
            f"the option {text[:80]!r}, which fairseq takes as Python, is not evaluated: allowed are numbers, strings, "
            "True, False, None, and tuples, lists and dictionaries of these"
        ) from None


def value_of(node: ast.expr) -> object:
    """The value of a parsed expression; raises ValueError or TypeError where it is no literal and no arithmetic."""
    if isinstance(node, ast.UnaryOp) and type(node.op) in SIGNS:
        return SIGNS[type(node.op)](value_of(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        left, right = value_of(node.left), value_of(node.right)
        for repeated, count in (left, right), (right, left):
            if isinstance(node.op, ast.Mult) and hasattr(repeated, "__len__") and len(repeated) * count > LONGEST:
                raise ValueError("too long")
        return ARITHMETIC[type(node.op)](left, right)
    if isinstance(node, (ast.List, ast.Tuple)):
        return {ast.List: list, ast.Tuple: tuple}[type(node)](map(value_of, node.elts))
    return ast.literal_eval(node)
