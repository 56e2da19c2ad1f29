"""How a function of fairseq is replaced."""

from __future__ import annotations

import functools
from typing import Callable


def replace(owner: object, name: str, make_wrapper: Callable[[Callable], Callable]) -> None:
    """Set `owner.name` to `make_wrapper(original)`, keeping the original's name and docstring."""
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(make_wrapper(original)))
