"""The one exception for mistakes that the user can mend, and the check of options that raises it."""

import math

AFTER_DIVERGENCE = "lower --lr; checkpoints that were saved before are as they were"


class UserError(ValueError):
    """One sentence for the user: the option or file, its value, and what is allowed.

    The excepthook of `fairseq_compat` prints it without a traceback.
    """


def check_values(options, allowed: dict) -> None:
    """Raises UserError for the first option whose value is not allowed; nan and inf never are.

    Args:
        options: has the values as attributes, numbers or lists of numbers.
        allowed: for an option's name with underscores, whether its value is, and what is.
    """
    for name, (holds, what) in allowed.items():
        value = getattr(options, name)
        if not is_finite(value):
            raise UserError(f"--{name.replace('_', '-')} {value} is not allowed: {what}, and finite")
        if not holds:
            raise UserError(f"--{name.replace('_', '-')} {value} is not allowed: {what}")


def is_finite(value) -> bool:
    """Whether an option's value holds neither nan nor inf; what is no number does not."""
    if isinstance(value, (list, tuple)):
        return all(map(is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)
