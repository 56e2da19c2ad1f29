"""The one exception for mistakes that the user can mend."""


class UserError(ValueError):
    """One sentence for the user: the option or file, its value, and what is allowed.

    The excepthook of `fairseq_compat` prints it without a traceback.
    """
