"""What fairseq needs of the plain dataclasses that hold this plugin's options."""

from argparse import ArgumentParser, Namespace
from dataclasses import field, fields, make_dataclass
from typing import Union

from fairseq.data import Dictionary
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.dataclass.utils import gen_parser_from_dataclass
from omegaconf import DictConfig, OmegaConf, open_dict

from mixtape_plugin.errors import check_types
from mixtape_plugin.output_layers import (
    OUTPUT_IMPLS,
    OUTPUT_LAYERS,
    OutputLayer,
    OutputLayerConfig,
    build_output_layer,
    check_dictionary,
)


def add_options(parser: ArgumentParser, *configs: type) -> None:
    """Adds each field of the dataclasses as an option, without a default, which is the architectures' to set."""
    choices = {"output_layer": OUTPUT_LAYERS, "output_impl": OUTPUT_IMPLS}
    for config in configs:
        options = [
            (
                f.name,
                ChoiceEnum(list(choices[f.name])) if f.name in choices else f.type,
                field(default=f.default, metadata=f.metadata),  # make_dataclass would change the config's own
            )
            for f in fields(config)
        ]
        options = make_dataclass(config.__name__, options, bases=(FairseqDataclass,))
        gen_parser_from_dataclass(parser, options(), delete_default=True, with_prefix="")


def complete_options(args: Union[Namespace, DictConfig], *configs: type) -> Namespace:
    """The options that fairseq hands to a model, as a Namespace, with the dataclasses' defaults for those missing.

    Raises UserError for a value of another type, which a yaml file or --model-overrides may have.

    Args:
        args: a Namespace of fairseq-train, or an omegaconf tree of fairseq-hydra-train; it is changed, too, since it
            is what a checkpoint keeps.
    """
    given = args
    if OmegaConf.is_config(args):
        args = Namespace(**OmegaConf.to_container(args))
    for config in configs:
        for name, default in vars(config()).items():
            value = getattr(args, name, default)
            if isinstance(default, str) and isinstance(value, int):  # --hidden-sizes of one layer, in a yaml file
                value = str(value)
            setattr(args, name, value)
        check_types(args, config)
        keep_in(given, **{name: getattr(args, name) for name in vars(config())})
    return args


def output_layer_for(args: Namespace, dictionary: Dictionary, feature_dim: int, **shared: object) -> OutputLayer:
    """The output layer that a model's options ask for, over a dictionary; ``shared`` as in build_output_layer."""
    config = OutputLayerConfig.from_args(args)
    check_dictionary(config, dictionary)
    return build_output_layer(config, feature_dim, len(dictionary), **shared)


def keep_in(given: Union[Namespace, DictConfig], **options: object) -> None:
    """Writes options into what fairseq handed over, where that is an omegaconf tree."""
    if OmegaConf.is_config(given):
        with open_dict(given):
            given.update(options)
