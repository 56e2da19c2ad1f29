"""The deprecations that fill a log and that nobody here can mend."""

from __future__ import annotations

import warnings

# (beginning of the message as a regular expression, category); each was seen in a log of fairseq-train or -generate.
KNOWN_DEPRECATIONS = [
    (r"hydra\.experimental\.(initialize|compose)\(\) is no longer experimental", UserWarning),
    (r"\nThe version_base parameter is not specified", UserWarning),
    (r"In '.*': Usage of deprecated keyword in package header", UserWarning),
    (r"\n'config' is validated against ConfigStore schema with the same name", UserWarning),
    (r"\nThe strict flag in the compose API is deprecated", UserWarning),
    (r"'pin_memory' argument is set as true but no accelerator is found", UserWarning),
    (r"`torch\.cuda\.amp\.autocast\(args\.\.\.\)` is deprecated", FutureWarning),
    (r"`torch\.cuda\.amp\.GradScaler\(args\.\.\.\)` is deprecated", FutureWarning),
    (r"Support for mismatched key_padding_mask and attn_mask is deprecated", UserWarning),
]


def silence_known_deprecations() -> None:
    """Silence, by name, the deprecations that fairseq meets in newer hydra and torch: they fill every log."""
    for message, category in KNOWN_DEPRECATIONS:
        warnings.filterwarnings("ignore", message=message, category=category)
