"""The one exception for mistakes that the user can mend, and the check of options that raises it."""

AFTER_DIVERGENCE = "lower --lr; checkpoints that were saved before are as they were"


class UserError(ValueError):
    """One sentence for the user: the option or file, its value, and what is allowed.

    The excepthook of `fairseq_compat` prints it without a traceback.
    """


def check_values(options, allowed: dict) -> None:
    """Raises UserError for the first option whose value is not allowed.

    Args:
        options: has the values as attributes.
        allowed: for an option's name with underscores, whether its value is, and what is.
    """
    for name, (holds, what) in allowed.items():
        if not holds:
            raise UserError(f"--{name.replace('_', '-')} {getattr(options, name)} is not allowed: {what}")
