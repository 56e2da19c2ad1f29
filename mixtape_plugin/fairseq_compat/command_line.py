"""Command lines that fairseq does not understand, and does not say so."""

from __future__ import annotations

from fairseq import options

from mixtape_plugin.errors import UserError
from mixtape_plugin.fairseq_compat.patching import replace


def ask_for_the_task_of_a_validation() -> None:
    """Say that fairseq-validate needs --task: it has no default, and ends in a KeyError without one."""

    def wrapper(parse_args_and_arch):
        def parse_or_ask(*args, **kwargs):
            try:
                return parse_args_and_arch(*args, **kwargs)
            except KeyError as error:
                if error.args != (None,):
                    raise
                raise UserError("fairseq-validate needs --task: that of the training, such as translation") from error

        return parse_or_ask

    replace(options, "parse_args_and_arch", wrapper)
