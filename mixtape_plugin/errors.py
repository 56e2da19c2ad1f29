"""The one exception for mistakes that the user can mend, the check of options that raises it, and how it is printed."""

from __future__ import annotations

import os
import re
import sys
import traceback
from dataclasses import fields
from numbers import Integral, Real
from typing import Sequence, get_args

FULL_TRACEBACK = "MIXTAPE_TRACEBACK"
LARGEST_FLOAT32 = (2 - 2**-23) * 2.0**127
# fairseq's own sentences about files and options, which its users get at the end of a traceback.
FAIRSEQ_SENTENCES = (
    *("Dataset not found:", "Model file not found:", "Could not infer language pair"),
    *("--share-all-embeddings ", "--finetune-from-model "),
    *("Size of sample #", "world size is ", "The dataset is empty. ", "MultilingualTranslationTask requires "),
)
AFTER_DIVERGENCE = "lower --lr; checkpoints that were saved before are as they were"


class UserError(ValueError):
    """One sentence for the user: the option or file, its value, and what is allowed.

    After :func:`print_user_errors` it is printed without a traceback.
    """


def check_values(options: object, allowed: dict) -> None:
    """Raises UserError for the first option whose value is not allowed; nan and what float32 has not never are.

    Args:
        options: has the values as attributes, numbers or lists of numbers.
        allowed: for an option's name with underscores, whether its value is, and what is.
    """
    for name, (holds, what) in allowed.items():
        value = getattr(options, name)
        if not is_finite(value):
            raise UserError(f"--{name.replace('_', '-')} {value} is not allowed: {what}, and finite in float32")
        if not holds:
            raise UserError(f"--{name.replace('_', '-')} {value} is not allowed: {what}")


def check_least(options: object, **least: float) -> None:
    """Raises UserError for the first option below its least value; one that is not given is None, or missing."""
    for name, lowest in least.items():
        value = getattr(options, name, None)
        if value is not None and not value >= lowest:  # nan is not
            raise UserError(f"--{name.replace('_', '-')} {value} is not allowed: at least {lowest}")


def check_type(options: object, name: str, kind: type, optional: bool = False) -> None:
    """Raises UserError where an option's value is not of its type: bool, int, float (or an int) or str.

    Args:
        options: has the value as an attribute.
        name: of the option, with underscores.
        kind: its type.
        optional: None is allowed, too.
    """
    value = getattr(options, name)
    accepted = {bool: bool, int: Integral, float: Real, str: str}[kind]
    if isinstance(value, accepted) and (kind is bool or not isinstance(value, bool)) or (optional and value is None):
        return
    what = {bool: "True or False", int: "a whole number", float: "a number", str: "a string"}[kind]
    raise UserError(f"--{name.replace('_', '-')} {value!r} is not allowed: {what}")


def check_types(options: object, config: type) -> None:
    """Raises UserError for the first option whose value is not of its type; that comes from Python or a file alone.

    Args:
        options: has the values as attributes.
        config: a dataclass of these options, whose default is None where a value may be.
    """
    for option in fields(config):
        optional = option.default is None
        kind = get_args(option.type)[0] if optional else option.type
        if kind in (bool, int, float, str):  # fairseq's choices are none of them
            check_type(options, option.name, kind, optional)


def is_finite(value: object) -> bool:
    """Whether an option's value holds neither nan nor what is inf in float32; what is no number does not."""
    if isinstance(value, Sequence) and not isinstance(value, str):  # omegaconf's lists are no list
        return all(map(is_finite, value))
    return not isinstance(value, Real) or bool(abs(value) <= LARGEST_FLOAT32)  # false for nan


def sentence_for_user(error: BaseException | None) -> str | None:
    """The message of the UserError that caused `error`, or one of FAIRSEQ_SENTENCES, else None."""
    if type(error).__name__ == "ProcessRaisedException":  # holds the traceback of a spawned process, as text
        theirs = "|".join(map(re.escape, FAIRSEQ_SENTENCES))
        sentence = rf"^(?:mixtape_plugin\.errors\.UserError: |[\w.]+: (?={theirs}))(.+)"
        found = re.search(sentence, str(error), re.MULTILINE)
        return found and found[1]
    seen = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, UserError) or str(error).startswith(FAIRSEQ_SENTENCES):
            return str(error)
        seen.add(id(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


def _excepthook(error_type, error, trace) -> None:
    sentence = sentence_for_user(error)
    if sentence is None or os.environ.get(FULL_TRACEBACK) == "1":
        traceback.print_exception(error_type, error, trace)
    else:
        print(f"error: {sentence}", file=sys.stderr)


def print_user_errors() -> None:
    """Print a UserError as one sentence (exit status 1, as ever); MIXTAPE_TRACEBACK=1 gives the full traceback."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _excepthook
