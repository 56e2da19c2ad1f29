"""Command lines that fairseq does not understand, and does not say so."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from difflib import get_close_matches
from typing import Union

from fairseq import models, options
from fairseq.data import data_utils
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY, MODEL_REGISTRY, FairseqLanguageModel
from fairseq.sequence_generator import SequenceGenerator
from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq.tasks.translation import TranslationTask
from fairseq.trainer import Trainer
from omegaconf import DictConfig, OmegaConf

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


def ask_for_the_task_of_a_language_model() -> None:
    """Say that a text without a language pair needs another --task than translation, fairseq-train's default."""

    def wrapper(infer_language_pair):
        def infer_or_ask(path):
            source, target = infer_language_pair(path)
            if source is None and os.path.isfile(os.path.join(path, "dict.txt")):
                raise UserError(
                    f"{path} holds the text of a language model, and no language pair: give --task "
                    "bptt_language_modeling (AWD-LSTM) or language_modeling"
                )
            return source, target

        return infer_or_ask

    replace(data_utils, "infer_language_pair", wrapper)


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


def refuse_options_that_no_model_has() -> None:
    """Refuse a misspelled `model.option` of fairseq-hydra-train, where the model is this plugin's.

    fairseq knows the options of models that have a dataclass alone; without, it takes any name and trains without it.
    A checkpoint's options are not looked at, which may be of an earlier version.
    """

    def wrapper(init):
        def init_or_refuse(self, cfg, *args, **kwargs):
            check_option_names(cfg.model)
            init(self, cfg, *args, **kwargs)

        return init_or_refuse

    replace(Trainer, "__init__", wrapper)


def refuse_models_of_another_kind() -> None:
    """Refuse a language model to translate with, and a model with an encoder as a language model.

    fairseq ends in the traceback of what the one has and the other has not, after the data were read.
    """

    def wrapper(build_model):
        def build_or_refuse(cfg, task, *args, **kwargs):
            arch = getattr(cfg, "_name", None) or getattr(cfg, "arch", None)
            model = ARCH_MODEL_REGISTRY.get(arch) or MODEL_REGISTRY.get(arch)
            if model is not None:
                of_language = issubclass(model, FairseqLanguageModel)
                if isinstance(task, TranslationTask) and of_language:
                    raise UserError(
                        f"--arch {arch} is a language model, which cannot translate: take one such as "
                        "mixtape_transformer, or --task language_modeling with a text of one language"
                    )
                if isinstance(task, LanguageModelingTask) and not of_language:
                    raise UserError(
                        f"--arch {arch} is no language model: take one such as mixtape_transformer_lm or awd_lstm_lm, "
                        "or --task translation with a parallel text"
                    )
            return build_model(cfg, task, *args, **kwargs)

        return build_or_refuse

    replace(models, "build_model", wrapper)


def check_option_names(tree: Union[Namespace, DictConfig]) -> None:
    """Raises UserError for the first name in an omegaconf tree of model options that neither the model's arguments nor
    its architecture have; a Namespace is of fairseq-train, which has looked itself."""
    arch = tree.get("_name") if OmegaConf.is_config(tree) else None
    model = ARCH_MODEL_REGISTRY.get(arch)
    if model is None or not model.__module__.startswith("mixtape_plugin."):
        return
    parser, defaults = ArgumentParser(), Namespace()
    model.add_args(parser)
    ARCH_CONFIG_REGISTRY[arch](defaults)
    # of a language model's positions fairseq-train knows by the task
    known = {action.dest for action in parser._actions} | vars(defaults).keys() | {"_name", "max_target_positions"}
    for name in tree:
        if name not in known:
            similar = get_close_matches(name, known, n=1)
            advice = f": {similar[0]}?" if similar else ", see docs/output_layers.md"
            raise UserError(f"model.{name} is no option of {arch}{advice}")
