"""Parameter counts of the language models, from the vocabulary's size alone, and their dropouts, against those of the
papers."""

import contextlib
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY

from mixtape_plugin.models.awd_lstm_lm import ARCHITECTURES, AWDLSTMConfig, count_parameters
from mixtape_plugin.models.options import complete_options

PTB, WIKITEXT2, ONE_BILLION, TEXT8 = 10_000, 33_278, 100_000, 27


def without_memory():
    """Tensors made inside have a shape and no values; those of torch 1 have both."""
    return torch.device("meta") if hasattr(torch.device, "__enter__") else contextlib.nullcontext()


def build(arch, vocab_size, masked=("<s>", "<pad>"), **options):
    """A model over `vocab_size` tokens that can be predicted and the masked ones, as the task would build it."""
    dictionary = Dictionary()
    for n in range(vocab_size + len(masked) - dictionary.nspecial):
        dictionary.add_symbol(f"w{n}", n=vocab_size - n)
    assert len(dictionary) == vocab_size + len(masked)
    masked_tokens = tuple(dictionary.index(symbol) for symbol in masked)
    task = SimpleNamespace(
        source_dictionary=dictionary, target_dictionary=dictionary, dictionary=dictionary, masked_tokens=masked_tokens
    )
    args = Namespace(**options)
    ARCH_CONFIG_REGISTRY[arch](args)
    with without_memory():
        return ARCH_MODEL_REGISTRY[arch].build_model(args, task)


@pytest.mark.parametrize(
    "arch, vocab_size, count",
    [
        ("awd_lstm_lm_ptb", PTB, 24_221_600),
        ("awd_lstm_lm_ptb_mos", PTB, 21_500_620),
        ("awd_lstm_lm_ptb_moc", PTB, 21_500_620),
        ("awd_lstm_lm_ptb_sigsoftmax", PTB, 24_221_600),
        ("awd_lstm_lm_ptb_gss", PTB, 24_221_600),
        ("awd_lstm_lm_ptb_plif", PTB, 24_321_600),
        ("awd_lstm_lm_wikitext2_sigsoftmax", WIKITEXT2, 33_556_078),
        ("awd_lstm_lm_wikitext2_gss", WIKITEXT2, 33_556_078),
        ("awd_lstm_lm_wikitext2_plif", WIKITEXT2, 33_656_078),
        ("awd_lstm_lm_wikitext2", WIKITEXT2, 33_556_078),
        ("awd_lstm_lm_wikitext2_mos", WIKITEXT2, 34_909_528),
        ("awd_lstm_lm_wikitext2_moc", WIKITEXT2, 34_909_528),
        ("awd_lstm_lm_one_billion", ONE_BILLION, 119_293_600),
        ("awd_lstm_lm_one_billion_mos", ONE_BILLION, 112_850_364),
    ],
)
def test_counts_of_the_papers(arch, vocab_size, count):
    assert count_parameters(build(arch, vocab_size)) == count


MONOTONE = ("sigsoftmax", "gss", "plif")
DROPOUTS = {  # of the output, the input, between the layers, of the embedding, of weights, of context vectors
    "": (0.4, 0.4, 0.25, 0.1, 0.5, 0),  # as ptb
    "_ptb": (0.4, 0.4, 0.25, 0.1, 0.5, 0),  # Merity et al. 2018
    "_wikitext2": (0.4, 0.65, 0.2, 0.1, 0.5, 0),
    # the README of Yang et al. 2018; Mixtape's are not published: MoS's
    **dict.fromkeys(["_ptb_mos", "_ptb_moc", "_ptb_mixtape"], (0.4, 0.4, 0.225, 0.1, 0.5, 0.29)),
    **dict.fromkeys(["_wikitext2_mos", "_wikitext2_moc", "_wikitext2_mixtape"], (0.4, 0.55, 0.2, 0.1, 0.5, 0.29)),
    **{f"_ptb_{layer}": (0.4, 0.4, 0.3, 0.1, 0.5, 0) for layer in MONOTONE},  # Parthiban et al. 2021
    **{f"_wikitext2_{layer}": (0.4, 0.65, 0.2, 0.1, 0.5, 0) for layer in MONOTONE},
    **{f"_one_billion{layer}": (0,) * 6 for layer in ("", "_mos", "_mixtape")},  # Yang et al. 2018, appendix B.2
    **{f"_text8{layer}": (0,) * 6 for layer in ("", "_mos7", "_mos10")},
}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_dropouts_of_the_papers(arch):
    assert DROPOUTS.keys() == ARCHITECTURES.keys()
    args = Namespace()
    ARCH_CONFIG_REGISTRY[f"awd_lstm_lm{arch}"](args)
    args = complete_options(args, AWDLSTMConfig)
    names = ["dropout", *(f"{part}_dropout" for part in ("input", "hidden", "embedding", "weight", "context"))]
    assert tuple(getattr(args, name) for name in names) == DROPOUTS[arch]
    assert args.locked_context_dropout == (args.context_dropout > 0)
    assert args.gate_dropout == (0.2 if arch in ("_ptb_mixtape", "_wikitext2_mixtape") else 0)
    assert args.gss_k == (3 if arch == "_wikitext2_gss" else 2.5)


def test_frozen_slopes_do_not_count():
    model = build("awd_lstm_lm_ptb_plif", PTB, freeze_plif=True)
    assert count_parameters(model) == 24_221_600
    assert model.state_dict()["decoder.output_projection.slopes_raw"].shape == (100_000,)


@pytest.mark.parametrize(
    "arch, lr_scale",  # Parthiban et al. 2021: .02 beside 20 and 30; others are not trained by SGD
    [("awd_lstm_lm_ptb_plif", 0.02 / 20), ("awd_lstm_lm_wikitext2_plif", 0.02 / 30), ("awd_lstm_lm", 1)],
)
def test_learning_rate_of_slopes(arch, lr_scale):
    slopes = build(arch, 20, output_layer="plif").decoder.output_projection.slopes_raw
    assert slopes.optim_overrides["optimizer"]["lr_scale"] == pytest.approx(lr_scale)


@pytest.mark.parametrize(
    "num_components, count",
    [(1, 19_057_620), (3, 19_406_620), (5, 19_755_620), (10, 20_628_120), (15, 21_500_620), (20, 22_373_120)],
)
def test_mos_on_penn_treebank_by_number_of_components(num_components, count):
    assert count_parameters(build("awd_lstm_lm_ptb_mos", PTB, num_components=num_components)) == count


@pytest.mark.parametrize(
    "arch, sizes, count",
    [
        ("awd_lstm_lm_ptb_mos", {"embed_dim": 280, "hidden_sizes": "960,960,280"}, 17_535_200),
        ("awd_lstm_lm_ptb", {"embed_dim": 340, "hidden_sizes": "960,960,340"}, 17_560_880),
    ],
)
def test_equal_parameters(arch, sizes, count):
    """Table 5 of Parthiban et al.: MoS-15 and a wider softmax."""
    assert count_parameters(build(arch, PTB, **sizes)) == count


def test_softmax_with_the_sizes_of_mos_on_wikitext2():
    sizes = {"embed_dim": 300, "hidden_sizes": "1150,1150,300"}
    lstm = 4 * (1150 * 300 + 1150 * 1150 + 2300) + 4 * (2 * 1150 * 1150 + 2300) + 4 * 300 * (1150 + 300 + 2)
    assert count_parameters(build("awd_lstm_lm_wikitext2", WIKITEXT2, **sizes)) == 33_278 * 301 + lstm == 29_027_478


@pytest.mark.parametrize(
    "arch, sizes, count",
    [
        ("awd_lstm_lm_text8", {}, 8_424_475),
        ("awd_lstm_lm_text8_mos7", {}, 8_448_517),
        ("awd_lstm_lm_text8_mos10", {}, 8_432_711),
        # 7·750·751 + 7·750 + 4·750·1502 + 27·751; table 12 of the MoS paper prints 8.45M, and 8.43M for MoS-10
        ("awd_lstm_lm_text8_mos7", {"embed_dim": 750, "hidden_sizes": "750"}, 8_474_277),
        ("awd_lstm_lm_text8_mos10", {"embed_dim": 683, "hidden_sizes": "683"}, 8_434_394),
    ],
)
def test_text8(arch, sizes, count):
    assert count_parameters(build(arch, TEXT8, masked=("<s>", "<pad>", "</s>", "<unk>"), **sizes)) == count


@pytest.mark.parametrize(
    "arch, vocab_size, count, mos",
    [
        # (V+2)/10 frequent tokens, of which <s> and <pad> do not count
        ("ptb", PTB, 10_000 * 281 + 17_828_256 + 4 * 280 * 621 + 192 * 621 + 3 * 620 + 998 * 67, 21_500_620),
        ("wikitext2", WIKITEXT2, 33_278 * 301 + 23_750_528 + 1200 * 651 + 192 * 651 + 3 * 650 + 3326 * 67, 34_909_528),
        (
            "one_billion",
            ONE_BILLION,
            100_000 * 901 + 18_250_816 + 3600 * 1025 + 192 * 1025 + 3 * 1024 + 9998 * 67,
            112_850_364,
        ),
    ],
)
def test_mixtape_has_as_many_as_mos(arch, vocab_size, count, mos):
    assert count_parameters(build(f"awd_lstm_lm_{arch}_mixtape", vocab_size)) == count
    assert count == pytest.approx(mos, rel=0.001)


def test_an_untied_output_embedding_counts():
    sizes = {"embed_dim": 6, "hidden_sizes": "5,6"}
    tied = count_parameters(build("awd_lstm_lm", 50, **sizes))
    assert count_parameters(build("awd_lstm_lm", 50, untie_embeddings=True, **sizes)) - tied == 50 * 6


@pytest.mark.parametrize("layer", ["softmax", "mos", "mixtape"])
@pytest.mark.parametrize("untie_embeddings", [False, True])
def test_only_rows_of_masked_tokens_are_left_out(layer, untie_embeddings):
    options = {"output_layer": layer, "embed_dim": 6, "hidden_sizes": "5,6", "gate_dim": 3, "frequent_ratio": 0.2}
    options["untie_embeddings"] = untie_embeddings
    # 48 tokens in all, 10 of them frequent; the last one is none
    model = build("awd_lstm_lm", 44, masked=("<s>", "<pad>", "</s>", "w43"), **options)
    row = (6 + 1) + (6 if untie_embeddings else 0)
    left_out = 4 * row + (3 * (3 + 3) if layer == "mixtape" else 0)
    assert sum(p.numel() for p in model.parameters()) - count_parameters(model) == left_out
