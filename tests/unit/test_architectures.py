"""Options reach the output layer, and the papers' architectures are those of the papers."""

import argparse
import copy

import pytest
import torch
from conftest import LAYERS, build_model, build_small_model, complete_args, make_dictionary
from fairseq import options, tasks
from fairseq.models.transformer import TransformerConfig, TransformerModel
from fairseq.modules import FairseqDropout
from omegaconf import OmegaConf

from mixtape_plugin.errors import UserError
from mixtape_plugin.fairseq_compat.command_line import check_option_names
from mixtape_plugin.models import transformer
from mixtape_plugin.output_layers import OUTPUT_LAYERS, OutputLayerConfig

WMT = {
    "mixtape_transformer_wmt_en_de_big": {"d": 1024, "ffn": 4096, "dropout": 0.3, "gate_dropout": 0.2, "billions": 0.2},
    "mixtape_transformer_wmt_en_fr_big": {
        "d": 2048,
        "ffn": 8192,
        "dropout": 0.25,
        "gate_dropout": 0.15,
        "billions": 0.8,
    },
}
VOCABULARY = 32000

ALL_OPTIONS = {
    "output_layer": "mixtape",
    "num_components": 3,
    "output_embed_dim": 12,
    "context_scale": 2.5,
    "context_dropout": 0.15,
    "locked_context_dropout": True,
    "gate_dim": 5,
    "gate_dropout": 0.25,
    "gate_noise": 0.3,
    "frequent_ratio": 0.75,
    "gate_weight_norm": True,
    "gss_c": 0.5,
    "gss_k": 3.5,
    "plif_pieces": 60,
    "plif_range": 7.5,
    "plif_init_std": 0.5,
    "plif_lr_scale": 0.25,
    "context_scale_lr_scale": 0.5,
    "freeze_plif": True,
    "output_impl": "eager",
}


def build(data, *more, arch="mixtape_transformer_tiny"):
    """The model of a command line, as fairseq-train builds it."""
    args = ["--arch", arch, "--criterion", "output_layer_cross_entropy", "--max-tokens", 512, data, *more]
    args = options.parse_args_and_arch(options.get_training_parser(), list(map(str, args)))
    return tasks.setup_task(args).build_model(args)


def test_defaults_reach_the_layer(data):
    layer = build(data).decoder.output_projection
    assert layer.config == OutputLayerConfig()
    assert layer.config.output_layer == "mixtape" and type(layer) is OUTPUT_LAYERS["mixtape"]
    assert (layer.num_components, layer.num_frequent) == (4, 20)  # half of 30 words, 4 special symbols and 6 of padding


def test_every_option_reaches_the_layer(data):
    assert set(ALL_OPTIONS) == set(OutputLayerConfig.__dataclass_fields__)
    assert all(value != getattr(OutputLayerConfig(), name) for name, value in list(ALL_OPTIONS.items())[1:])
    given = []
    for name, value in ALL_OPTIONS.items():
        given += ["--" + name.replace("_", "-")] + ([] if value is True else [value])
    model = build(data, *given, "--max-relative-position", 7)
    layer = model.decoder.output_projection
    assert {name: getattr(layer.config, name) for name in ALL_OPTIONS} == ALL_OPTIONS
    assert layer.weight.shape == (40, 12) and layer.gate_embedding.shape == (30, 5)
    for side in model.encoder, model.decoder:
        assert [part.self_attn.max_relative_position for part in side.layers] == [7, 7]


@pytest.mark.parametrize("arch", WMT)
@pytest.mark.parametrize("more, absolute", [([], False), (["--max-relative-position", 0], True)])
def test_wmt_architectures_know_the_order_of_words(data, arch, more, absolute):
    args = ["--arch", arch, "--criterion", "output_layer_cross_entropy", "--max-tokens", 512, data, *more]
    args = options.parse_args_and_arch(options.get_training_parser(), list(map(str, args)))
    assert args.no_token_positional_embeddings is not absolute and (args.max_relative_position > 0) is not absolute


@pytest.mark.parametrize("output_layer", LAYERS)
def test_options_as_a_config_tree(output_layer):
    """fairseq-hydra-train and the loading of its checkpoints hand over an omegaconf tree, not a Namespace."""
    args = complete_args(
        "mixtape_transformer_tiny", output_layer=output_layer, num_components=5, max_relative_position=2
    )
    tree = OmegaConf.create(vars(args))
    dictionary = make_dictionary()
    task = argparse.Namespace(source_dictionary=dictionary, target_dictionary=dictionary)
    model = transformer.MixtapeTransformerModel.build_model(tree, task)
    assert type(model.decoder.output_projection) is OUTPUT_LAYERS[output_layer]
    assert model.decoder.output_projection.config.num_components == 5
    assert model.encoder.layers[0].self_attn.max_relative_position == 2


def test_a_config_tree_keeps_what_was_not_given():
    """It is what a checkpoint holds: later options are compared with those, and --model-overrides replaces them."""
    tree = OmegaConf.create({**vars(complete_args("mixtape_transformer_tiny")), "_name": "mixtape_transformer_tiny"})
    for name in "gss_k", "context_dropout", "max_relative_position":
        tree.pop(name, None)
    dictionary = make_dictionary()
    task = argparse.Namespace(source_dictionary=dictionary, target_dictionary=dictionary)
    transformer.MixtapeTransformerModel.build_model(tree, task)
    assert (tree.gss_k, tree.context_dropout, tree.max_relative_position) == (2.5, 0.0, 0)
    check_option_names(tree)


@pytest.mark.parametrize("positions", [0, 2])
def test_dropouts_have_the_names_of_fairseqs_own(positions):
    """By which --retain-dropout-modules chooses them."""
    dictionary = make_dictionary()
    task = argparse.Namespace(source_dictionary=dictionary, target_dictionary=dictionary)
    ours = build_model("mixtape_transformer_tiny", max_relative_position=positions)
    stock = TransformerModel.build_model(complete_args("mixtape_transformer_tiny"), task)
    names = [
        {path: module.module_name for path, module in model.named_modules() if isinstance(module, FairseqDropout)}
        for model in (ours, stock)
    ]
    assert names[0] == names[1] and {"TransformerEncoder", "TransformerDecoder"} < {*names[0].values()}


@pytest.mark.parametrize("shared", ["", "share_decoder_input_output_embed", "share_all_embeddings"])
@pytest.mark.parametrize("output_layer", LAYERS)
def test_tied_embeddings_are_one_parameter(output_layer, shared):
    model = build_model("mixtape_transformer_tiny", output_layer=output_layer, **({shared: True} if shared else {}))
    weight = model.decoder.output_projection.weight
    assert (weight is model.decoder.embed_tokens.weight) == bool(shared)
    assert (weight is model.encoder.embed_tokens.weight) == (shared == "share_all_embeddings")


# -------------------------------------------------------------------------------------------------- the papers


@pytest.mark.parametrize("arch", WMT)
def test_options_of_the_paper(arch):
    """Mixtape, section 4.2."""
    args, paper = complete_args(arch), WMT[arch]
    for side in "encoder", "decoder":
        size = [getattr(args, f"{side}_{name}") for name in ("layers", "embed_dim", "ffn_embed_dim", "attention_heads")]
        assert size == [6, paper["d"], paper["ffn"], 16]
    assert (args.dropout, args.attention_dropout, args.gate_dropout) == (paper["dropout"], 0.15, paper["gate_dropout"])
    assert args.max_relative_position > 0 and args.no_token_positional_embeddings
    assert (args.output_layer, args.num_components) == ("mixtape", 4)
    config = OutputLayerConfig.from_args(args)
    assert (config.gate_noise, config.gate_weight_norm, config.context_dropout) == (0.1, False, 0)
    assert complete_args(arch, output_layer="mos").num_components == 9  # Kong et al. 2018
    assert complete_args(arch, output_layer="mos", num_components=15).num_components == 15


@pytest.mark.parametrize("arch", [*WMT, *(f"mixtape_transformer{name}" for name in ("", "_tiny", "_iwslt"))])
def test_architecture_applied_twice_changes_nothing(arch):
    once = complete_args(arch)
    twice = copy.deepcopy(once)
    getattr(transformer, arch)(twice)
    assert vars(once) == vars(twice)


def expected_parameters(d, ffn, vocabulary, relative=20, heads=16, layers=6, components=4, gate_dim=64):
    """Counted by hand: one embedding for all, pre-norm layers with biases, Mixtape with half the tokens frequent."""
    norm, attention = 2 * d, 4 * (d * d + d)
    self_attention = attention + 2 * (2 * relative + 1) * (d // heads)
    feed_forward = d * ffn + ffn + ffn * d + d
    encoder = layers * (self_attention + feed_forward + 2 * norm) + norm
    decoder = layers * (self_attention + attention + feed_forward + 3 * norm) + norm
    gates, frequent = components - 1, vocabulary // 2
    output = vocabulary + components * (d * d + d)  # bias of the words, contexts
    output += gates * (gate_dim * d + gate_dim) + gates * d + frequent * (gate_dim + gates)
    return vocabulary * d + encoder + decoder + output


@pytest.mark.parametrize("arch", WMT)
def test_parameters_of_the_paper(arch):
    """0.2 and 0.8 billion (Mixtape, table 1), with a joined dictionary of 32,000 words; nothing is allocated."""
    dictionary = make_dictionary(VOCABULARY - 4)
    assert len(dictionary) == VOCABULARY
    with torch.device("meta"):
        model = build_model(arch, dictionary)
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{arch}: {count:,} parameters with {VOCABULARY:,} words")
    assert count == expected_parameters(WMT[arch]["d"], WMT[arch]["ffn"], VOCABULARY)
    assert round(count / 1e9, 1) == WMT[arch]["billions"]


def test_relative_attention_has_the_noise_of_quantization():
    for noise in 0.0, 0.1:
        model = build_small_model(max_relative_position=3, quant_noise_pq=noise, quant_noise_pq_block_size=4)
        for side in model.encoder, model.decoder:
            for layer in side.layers:
                for name in "q_proj", "k_proj", "v_proj", "out_proj":
                    assert len(getattr(layer.self_attn, name)._forward_pre_hooks) == (noise > 0)


def test_options_of_fairseqs_layers_reach_those_of_relative_positions(monkeypatch):
    args = complete_args("mixtape_transformer_tiny", max_relative_position=3)
    args.quant_noise_pq, args.quant_noise_pq_block_size = 0.1, 3
    cfg = TransformerConfig.from_namespace(args)
    with pytest.raises(AssertionError, match="multiple of block sizes"):
        transformer.relative_attention(cfg, 16, 2)
    cfg.checkpoint_activations, cfg.offload_activations, seen = True, True, []
    monkeypatch.setattr(transformer, "checkpoint_wrapper", lambda layer, **options: seen.append(options) or layer)
    transformer.wrap(torch.nn.Linear(2, 2), cfg)
    assert seen == [{"offload_to_cpu": True}]


def test_activation_checkpointing_of_relative_positions_changes_no_gradient():
    tokens = torch.arange(4, 10).view(2, 3)
    gradients, calls, counts = [], [], []
    for checkpointing in False, True:
        model = build_small_model(max_relative_position=3, checkpoint_activations=checkpointing).train()
        for layer in (*model.encoder.layers, *model.decoder.layers):
            layer.self_attn.register_forward_hook(lambda *_: calls.append(1))
        logits, _ = model(tokens, torch.tensor([3, 3]), tokens)
        logits.square().mean().backward()
        gradients.append({name: x.grad for name, x in model.named_parameters() if x.grad is not None})
        counts.append(len(calls))
    torch.testing.assert_close(*gradients)
    assert counts == [4, 4 + 8], "each layer once more, in the backward pass"


@pytest.mark.parametrize("name", ["cross_self_attention", "encoder_xformers_att_config", "decoder_xformers_att_config"])
def test_an_attention_without_relative_positions_is_refused(name):
    sentence = f"--{name.replace('_', '-')} x does not go with --max-relative-position 3: use --max-relative-position 0"
    with pytest.raises(UserError, match=sentence):
        build_small_model(max_relative_position=3, **{name: "x"})


def test_heads_and_dropout_of_each_side_reach_relative_attention():
    model = build_small_model(
        max_relative_position=3, encoder_attention_heads=2, decoder_attention_heads=4, attention_dropout=0.25
    )
    for side, heads in (model.encoder, 2), (model.decoder, 4):
        for layer in side.layers:
            assert layer.self_attn.num_heads == heads and layer.self_attn.relative_key.shape == (7, 16 // heads)
            assert layer.self_attn.dropout_module.p == 0.25
