"""How a function of fairseq is replaced."""

from __future__ import annotations

import functools


def replace(owner, name: str, make_wrapper) -> None:
    """Set `owner.name` to `make_wrapper(original)`, keeping the original's name and docstring."""
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(make_wrapper(original)))
