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


def refuse_language_models_that_mask_what_a_search_needs() -> None:
    """Refuse --lm-path of a language model without </s>, with which a search finds no end, and
    --lm-weight below 0 where it gives any tokens no probability: fairseq multiplies their log-probability, minus
    infinity, and would take such a token always.
    """

    def wrapper(init):
        def init_or_refuse(self, *args, **kwargs):
            init(self, *args, **kwargs)
            layer = find_output_layer(self.lm_model) if self.lm_model is not None else None
            masked = layer.masked_tokens if layer is not None else ()
            if self.eos in masked:  # with a weight of 0, too: 0 · −inf is no number
                raise UserError(
                    "--lm-path is a language model of --remove-eos, which predicts no </s>, where a translation ends: "
                    "train it without"
                )
            if masked and self.lm_weight < 0:
                raise UserError(
                    f"--lm-weight {self.lm_weight} is not allowed: 0 or more, since the language model gives "
                    "some tokens, such as <s>, no probability"
                )

        return init_or_refuse

    replace(SequenceGenerator, "__init__", wrapper)
