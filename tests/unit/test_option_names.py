"""Names of model options in an omegaconf tree, as fairseq-hydra-train has them."""

import argparse

import pytest
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from omegaconf import OmegaConf

import mixtape_plugin.models  # noqa: F401
from mixtape_plugin.errors import UserError
from mixtape_plugin.fairseq_compat.command_line import check_option_names

OURS = [arch for arch, model in ARCH_MODEL_REGISTRY.items() if model.__module__.startswith("mixtape_plugin.")]


@pytest.mark.parametrize("arch", OURS)
def test_every_option_of_an_architecture_is_known(arch):
    """Those of its command line, and what the architecture sets beside them."""
    parser, args = argparse.ArgumentParser(), argparse.Namespace()
    ARCH_MODEL_REGISTRY[arch].add_args(parser)
    given = vars(parser.parse_args([]))
    ARCH_CONFIG_REGISTRY[arch](args)
    assert len(given) > 10
    check_option_names(OmegaConf.create({**given, **vars(args), "_name": arch}))


@pytest.mark.parametrize(
    "arch, name, sentence",
    [
        ("awd_lstm_lm", "num_component", "model.num_component is no option of awd_lstm_lm: num_components?"),
        ("mixtape_transformer_lm", "gate_dims", "model.gate_dims is no option of mixtape_transformer_lm: gate_dim?"),
        ("mixtape_transformer_tiny", "qq", "model.qq is no option of mixtape_transformer_tiny, see .*"),
        ("dialog_seq2seq", "Cell", "model.Cell is no option of dialog_seq2seq: cell?"),
    ],
)
def test_another_name_is_refused(arch, name, sentence):
    with pytest.raises(UserError, match=f"^{sentence.replace('?', '[?]')}$"):
        check_option_names(OmegaConf.create({"_name": arch, "output_layer": "mos", name: 7}))


def test_what_fairseq_has_checked_is_left_alone():
    check_option_names(argparse.Namespace(arch="awd_lstm_lm", num_component=7))
    for name in ("transformer_lm", "lstm", None):
        check_option_names(OmegaConf.create({"_name": name, "num_component": 7}))
