"""The Transformer language model: fairseq's own but for the output layer, causal, and through fairseq's commands."""

import math
import re
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from conftest import LAYERS, USER_DIR, make_dictionary, run
from fairseq import checkpoint_utils, models
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.data.dictionary import TruncatedDictionary
from fairseq.models.transformer_lm import TransformerLanguageModel, base_lm_architecture
from omegaconf import OmegaConf
from reference import layer_log_probs

from mixtape_plugin.analysis import trained_model
from mixtape_plugin.criterions.output_layer_cross_entropy import OutputLayerCrossEntropy
from mixtape_plugin.errors import UserError
from mixtape_plugin.fairseq_compat.command_line import check_option_names
from mixtape_plugin.models.transformer_lm import MixtapeTransformerLanguageModel

SIZE = dict(decoder_layers=2, decoder_embed_dim=16, decoder_ffn_embed_dim=32, decoder_attention_heads=2)
TOKENS = torch.tensor([[7, 12, 30, 9, 2, 5, 8, 4], [4, 11, 25, 2, 6, 20, 21, 13]])


def make_task(**options):
    dictionary, options = make_dictionary(), SimpleNamespace(**{"tokens_per_sample": 8, **options})
    return SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary, args=options)


def build(model=MixtapeTransformerLanguageModel, task=None, **options):
    """A small model in float64 with weights large enough for sharp distributions."""
    torch.manual_seed(1)
    args = Namespace(**{**SIZE, "max_target_positions": 8, "gate_dim": 8, **options})
    base_lm_architecture(args)
    built = model.build_model(args, task or make_task()).double().eval()
    for parameter in built.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(3)
    return built


@pytest.mark.parametrize("share", [False, True])
def test_softmax_is_fairseqs_own(share):
    """The same parameters but for the bias, the same scores."""
    ours = build(output_layer="softmax", share_decoder_input_output_embed=share)
    parameters = ours.state_dict()
    assert parameters.pop("decoder.output_projection.bias").eq(0).all()
    fairseqs = build(TransformerLanguageModel, share_decoder_input_output_embed=share)
    fairseqs.load_state_dict(parameters)
    torch.testing.assert_close(ours(TOKENS)[0], fairseqs(TOKENS)[0])


@pytest.mark.parametrize("place", ["args", "cfg"])
def test_length_is_the_tasks(place):
    """Of --tokens-per-sample, which newer tasks than language_modeling keep in ``cfg``."""
    task = make_task()
    task.__dict__[place] = SimpleNamespace(tokens_per_sample=11)
    if place == "cfg":
        del task.args
    assert build(task=task, output_layer="mos", max_target_positions=None).max_positions() == 11


@pytest.mark.parametrize("relative", [0, 3])
@pytest.mark.parametrize("output_layer", LAYERS)
def test_distributions(output_layer, relative):
    """Those of the layer's formula, of the tokens before alone, and the same one token at a time."""
    model = build(output_layer=output_layer, max_relative_position=relative)
    features, _ = model(TOKENS, features_only=True)
    expected = layer_log_probs(model.decoder.output_projection, features).view(2, 8, -1)
    log_probs = model.get_normalized_probs(model(TOKENS), log_probs=True)
    torch.testing.assert_close(log_probs.double(), expected, rtol=1e-5, atol=1e-5)  # fairseq's is in float32

    changed = TOKENS.clone()
    changed[:, 5:] = 17
    other, _ = model(changed, features_only=True)
    torch.testing.assert_close(other[:, :5], features[:, :5])
    assert (other[:, 5:] - features[:, 5:]).abs().max() > 0.1

    state = {}
    steps = [model.decoder(TOKENS[:, : n + 1], incremental_state=state, features_only=True)[0] for n in range(8)]
    # fairseq's softmax over positions is in float32 then
    torch.testing.assert_close(torch.cat(steps, 1), features, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("relative", [0, 3])
def test_there_is_no_attention_to_an_encoder(relative):
    names = build(output_layer="softmax", max_relative_position=relative).state_dict()
    assert any("self_attn" in name for name in names) and not any("encoder_attn" in name for name in names)


@pytest.mark.parametrize("output_layer", LAYERS)
def test_the_criterion_is_fairseqs_cross_entropy(output_layer):
    model = build(output_layer=output_layer)
    net_input = {"src_tokens": TOKENS, "src_lengths": torch.tensor([8, 8])}
    target = torch.cat([TOKENS[:, 1:], TOKENS[:, :1]], 1)
    target[1, 6:] = 1  # padding
    sample, task = {"net_input": net_input, "target": target, "ntokens": 14}, make_task()
    found = []
    for criterion in OutputLayerCrossEntropy(task, False), CrossEntropyCriterion(task, False):
        model.zero_grad()
        loss, sample_size, _ = criterion(model, sample)
        loss.backward()
        found.append([loss.detach().double(), sample_size, [p.grad.clone() for p in model.parameters()]])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_positions_and_options_of_a_config_tree():
    """fairseq-hydra-train hands over an omegaconf tree of what was given; positions are as many as a block's tokens."""
    args = OmegaConf.create({"_name": "mixtape_transformer_lm", **SIZE, "output_layer": "moc", "num_components": 3})
    model = models.build_model(args, make_task())
    assert model.max_positions() == 8 and model.decoder.output_projection.num_components == 3
    check_option_names(args)
    # the tree is what a checkpoint keeps: read with blocks of another length it is the same model
    again = OmegaConf.create(OmegaConf.to_container(args))
    assert models.build_model(again, make_task(tokens_per_sample=3)).max_positions() == 8
    assert (again.num_components, again.context_dropout, again.gss_k) == (3, 0.0, 2.5)
    longer = OmegaConf.create({"_name": "mixtape_transformer_lm", **SIZE})
    assert models.build_model(longer, make_task(max_target_positions=40)).max_positions() == 40
    kept = build(decoder_layers_to_keep="0", max_target_positions=5)
    assert kept.max_positions() == 5 and len(kept.decoder.layers) == 1


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(adaptive_input=True), "--adaptive-input does not go with --output-layer mixtape"),
        (dict(character_embeddings=True), "--character-embeddings does not go with --output-layer mixtape"),
        (dict(tie_adaptive_weights=True), "--tie-adaptive-weights does not go with --output-layer mixtape"),
        (dict(adaptive_softmax_cutoff="10,20"), "--adaptive-softmax-cutoff 10,20 does not go with"),
        (dict(base_layers=1), "--base-layers 1 is not allowed"),
        (dict(dropout=1.5), "--dropout 1.5 is not allowed: from 0 to 1"),
        (dict(decoder_attention_heads="2"), "--decoder-attention-heads '2' is not allowed: a whole number"),
        (dict(decoder_embed_dim=None), "--decoder-embed-dim None is not allowed: a whole number"),
        (dict(decoder_layers_to_keep=1), "--decoder-layers-to-keep 1 is not allowed: a string"),
        (dict(max_relative_position=-1), "--max-relative-position -1 is not allowed"),
        (dict(num_components=1), "--num-components 1 is too few for"),
        (dict(output_layer="softmax", decoder_output_dim=8, share_decoder_input_output_embed=True), "softmax"),
    ],
)
def test_mistakes(options, message):
    with pytest.raises(UserError, match=re.escape(message)):
        build(**options)


def test_tied_embeddings_and_a_shorter_output_dictionary():
    task = make_task()
    task.target_dictionary = TruncatedDictionary(task.source_dictionary, 20)
    args = Namespace(**SIZE, max_target_positions=8, gate_dim=8, share_decoder_input_output_embed=True)
    base_lm_architecture(args)
    with pytest.raises(
        UserError, match="^--share-decoder-input-output-embed does not go with --output-dictionary-size"
    ):
        MixtapeTransformerLanguageModel.build_model(args, task)
    args.share_decoder_input_output_embed = False
    model = MixtapeTransformerLanguageModel.build_model(args, task).eval()
    assert model.get_normalized_probs(model(TOKENS[:, :4]), log_probs=False).shape == (2, 4, 20)


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("transformer_lm")
    model = "--arch mixtape_transformer_lm --output-layer mixtape --gate-dim 8 --share-decoder-input-output-embed"
    size = "--decoder-layers 1 --decoder-embed-dim 16 --decoder-ffn-embed-dim 32 --decoder-attention-heads 2"
    training = "--task language_modeling --tokens-per-sample 20 --criterion output_layer_cross_entropy --optimizer adam"
    steps = "--lr 1e-2 --max-tokens 400 --max-epoch 4 --no-epoch-checkpoints --cpu --num-workers 0 --log-format json"
    folders = [text, "--save-dir", folder, "--user-dir", USER_DIR]
    log = run("train", *folders, *f"{model} {size} {training} {steps}".split()).log
    return SimpleNamespace(folder=folder, log=log)


def test_training(trained):
    losses = [float(line["valid_loss"]) for line in trained.log["valid"]]
    assert len(losses) == 4 and losses[-1] < losses[0] - 1


def test_a_sentence_that_is_too_long(trained, text, tmp_path):
    """Sentence by sentence a model has too few positions for, and no shorter block helps."""
    (tmp_path / "long").write_text("w1 w2\n" + "w1 " * 30 + "\n")
    places = [f"--testpref={tmp_path}/long", "--srcdict", text / "dict.txt", "--destdir", tmp_path / "bin"]
    run("preprocess", "--only-source", *places)
    command = [tmp_path / "bin", "--user-dir", USER_DIR, "--path", trained.folder / "checkpoint_last.pt", "--cpu"]
    command += ["--num-workers", 0, "--tokens-per-sample", 20, "--sample-break-mode"]
    for mode in "eos", "complete":
        with pytest.raises(
            UserError, match="^a sentence has 31 tokens, .* 20 positions: give --sample-break-mode none"
        ):
            run("eval_lm", *command, mode)
    assert "Evaluated 34 tokens" in run("eval_lm", *command, "none").stdout


def test_perplexity_of_a_text(trained, text):
    """fairseq-eval-lm counts every token once, at its probability by the layer's formula, or says why it cannot."""
    path = trained.folder / "checkpoint_last.pt"
    command = [text, "--user-dir", USER_DIR, "--path", path, *"--cpu --num-workers 0 --max-tokens 400".split()]
    with pytest.raises(UserError, match=r"has \d+ tokens, and the model has 20 positions: give --tokens-per-sample 20"):
        run("eval_lm", *command)
    for window in (20, 40):
        with pytest.raises(UserError, match=f"^blocks of {20 - window} tokens are not allowed: --tokens-per-sample"):
            run("eval_lm", *command, "--tokens-per-sample", 20, "--context-window", window)
    printed = run("eval_lm", *command, "--tokens-per-sample", 20).stdout
    count = int(re.search(r"Evaluated ([\d,]+) tokens", printed)[1].replace(",", ""))
    perplexity = float(re.search(r"Perplexity: ([\d.]+)", printed)[1])

    log_probs, stream = by_hand(path, text)
    assert count == len(stream)
    assert perplexity == pytest.approx(math.exp(-log_probs.gather(1, stream.unsqueeze(1)).mean()), rel=2e-3)


def by_hand(path, text):
    """log P of the layer's formula in float64, block by block, and the test text as one stream."""
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([str(path)], arg_overrides={"data": str(text)})
    model.double().eval()
    words = (text.parent / "test.x").read_text().replace("\n", " </s> ").split()
    stream = torch.tensor([task.source_dictionary.index(word) for word in words])
    log_probs = []
    for begin in range(0, len(stream), 20):  # each block begins with the token before it, and has no other context
        block = stream[begin : begin + 20]
        before = stream[begin - 1 : begin] if begin else torch.tensor([task.source_dictionary.eos()])
        features, _ = model(torch.cat([before, block[:-1]]).unsqueeze(0), features_only=True)
        log_probs.append(layer_log_probs(model.decoder.output_projection, features))
    return torch.cat(log_probs).detach(), stream


def test_analyses_read_its_text(trained, text):
    """In the order of the text, each line ending in </s>, with the distributions of the layer's formula."""
    model = trained_model.load(trained.folder, str(text), "checkpoint_last.pt")
    expected, stream = by_hand(model.checkpoint, text)
    found = model.read("test")
    assert torch.equal(found.targets, stream)
    assert [found.words(line) for line in (0, 1)] == [
        [*line.split(), "</s>"] for line in (text.parent / "test.x").read_text().splitlines()[:2]
    ]
    log_probs, targets = map(torch.cat, zip(*model.log_probs("test", batch_size=3)))
    assert torch.equal(targets, stream)
    torch.testing.assert_close(log_probs.double(), expected, rtol=1e-4, atol=1e-4)


def test_from_python(trained, text):
    """from_pretrained: scores are log-probabilities by the layer's formula, in nats; a sample follows its prompt."""
    model = MixtapeTransformerLanguageModel.from_pretrained(str(trained.folder), "checkpoint_last.pt", str(text))
    line = (text.parent / "test.x").read_text().splitlines()[0]
    log_probs, stream = by_hand(trained.folder / "checkpoint_last.pt", text)
    count = len(line.split())
    expected = log_probs[:count].gather(1, stream[:count].unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(model.score(line)["positional_scores"].double(), expected, rtol=1e-4, atol=1e-4)
    assert model.sample("x3 x4", beam=3, max_len_b=6).startswith("x3 x4 x5"), "the next in the alphabet follows"


def test_continuing_a_prompt(trained, text, tmp_path):
    (tmp_path / "prompts").write_text("x3 x4\n")
    options = "--task language_modeling --cpu --beam 3 --max-len-b 6 --input".split()
    folders = [text, "--user-dir", USER_DIR, "--path", trained.folder / "checkpoint_last.pt"]
    printed = run("interactive", *folders, *options, tmp_path / "prompts").stdout
    assert re.search(r"^H-0\t\S+\tx3 x4 x5", printed, re.MULTILINE), "the next in the alphabet follows"
