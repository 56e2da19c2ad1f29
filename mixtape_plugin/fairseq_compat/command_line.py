"""Command lines that fairseq does not understand, and does not say so."""

from __future__ import annotations

from fairseq import options
from fairseq.sequence_generator import SequenceGenerator

from mixtape_plugin.errors import UserError
from mixtape_plugin.fairseq_compat.patching import replace
from mixtape_plugin.output_layers import find_output_layer


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


def refuse_to_subtract_a_language_model_that_masks_tokens() -> None:
    """Refuse --lm-weight below 0 where the language model gives some tokens no probability.

    fairseq multiplies their log-probability, minus infinity, and would take such a token always.
    """

    def wrapper(init):
        def init_or_refuse(self, *args, **kwargs):
            init(self, *args, **kwargs)
            layer = find_output_layer(self.lm_model) if self.lm_model is not None and self.lm_weight < 0 else None
            if layer is not None and layer.masked_tokens:
                raise UserError(
                    f"--lm-weight {self.lm_weight} is not allowed: 0 or more, since the language model gives "
                    "some tokens, such as <s>, no probability"
                )

        return init_or_refuse

    replace(SequenceGenerator, "__init__", wrapper)
