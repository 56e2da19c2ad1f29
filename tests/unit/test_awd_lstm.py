"""The AWD-LSTM language model and its criterion, against the float64 reference.

Shapes: B columns, T time, E embedding, H_n hidden width of layer n, V vocabulary.
"""

import argparse
import math
from types import SimpleNamespace

import pytest
import reference
import reference_lm
import torch
import torch.nn.functional as F
from conftest import make_dictionary
from fairseq import models as fairseq_models
from fairseq.data.dictionary import TruncatedDictionary
from fairseq.models import ARCH_CONFIG_REGISTRY
from omegaconf import OmegaConf

from mixtape_plugin.errors import UserError
from mixtape_plugin.models.awd_lstm_lm import AWDLSTMConfig, AWDLSTMLanguageModel
from mixtape_plugin.models.options import complete_options
from mixtape_plugin.modules.weight_drop import WeightDropLSTM
from mixtape_plugin.output_layers import OUTPUT_LAYERS
from mixtape_plugin.tasks.bptt_language_modeling import BpttLanguageModelingConfig, BpttLanguageModelingTask

B, T, V, E, HIDDEN = 3, 6, 14, 5, (7, 8, 6)
MIXTURES = [name for name in OUTPUT_LAYERS if OUTPUT_LAYERS[name].has_components]
DROPOUTS = ("dropout", "input", "hidden", "embedding", "weight", "context")


def build_task(vocab_size=V, masked_tokens=()):
    dictionary = make_dictionary(vocab_size - 4)
    return SimpleNamespace(
        source_dictionary=dictionary,
        target_dictionary=dictionary,
        dictionary=dictionary,
        masked_tokens=tuple(masked_tokens),
    )


def build(output_layer="softmax", command="", vocab_size=V, masked_tokens=(), **dropout):
    """A small model in float64 from the options a user types; every dropout is 0 unless given.

    softmax needs the last layer to be as wide as the embedding, the mixtures have it wider.
    """
    torch.manual_seed(0)
    parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS)
    AWDLSTMLanguageModel.add_args(parser)
    options = f"--output-layer {output_layer}".split()
    sizes = [*HIDDEN[:-1], HIDDEN[-1] if OUTPUT_LAYERS[output_layer].has_projection else E]
    options += ["--embed-dim", str(E), "--hidden-sizes", ",".join(map(str, sizes)), "--gate-dim", "3"]
    options += "--gate-noise 0 --gate-dropout 0 --frequent-ratio 0.5 --num-components 3".split()
    options += "--plif-pieces 9 --plif-range 3".split()
    for name in DROPOUTS:
        options += ["--dropout" if name == "dropout" else f"--{name}-dropout", str(dropout.get(name, 0.0))]
    args = parser.parse_args([*options, *command.split()])
    ARCH_CONFIG_REGISTRY["awd_lstm_lm"](args)
    return AWDLSTMLanguageModel.build_model(args, build_task(vocab_size, masked_tokens)).double()


def sharpen(model):
    """Parameters, biases too, large enough to tell one wiring from another."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.6)
    return model


def parameters_of(model):
    """The reference's parameters: the embedding and a dict a layer."""
    layers = [dict(layer.named_parameters()) for layer in model.decoder.layers]
    return model.decoder.embed_tokens.weight, layers


def random_tokens(*shape):
    return torch.randint(2, V, shape or (B, T))


def expected_log_probs(model, features):
    return reference.layer_log_probs(model.decoder.output_projection, features).unflatten(0, features.shape[:2])


def weighted(features):
    """A scalar that every feature moves."""
    weights = torch.randn(features.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    return (features * weights).sum()


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


# ------------------------------------------------------------------------------------------- the bare architecture


def gates_of(args):
    """(r, weight norm) of what fairseq builds out of these options, as it does in training and on loading."""
    config = fairseq_models.build_model(args, build_task(vocab_size=50)).decoder.output_projection.config
    return config.frequent_ratio, config.gate_weight_norm


@pytest.mark.parametrize(
    "options, expected",
    [
        ("", (0.1, True)),
        ("--frequent-ratio 0.5", (0.5, True)),
        ("--gate-weight-norm", (0.1, True)),
        ("--no-gate-weight-norm", (0.1, False)),
        ("--frequent-ratio 1 --no-gate-weight-norm", (1.0, False)),
    ],
)
@pytest.mark.parametrize("arch", ["awd_lstm_lm", "awd_lstm_lm_ptb", "awd_lstm_lm_ptb_mixtape"])
def test_mixtape_has_the_gates_of_the_papers_language_models(arch, options, expected):
    parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS)
    AWDLSTMLanguageModel.add_args(parser)
    args = parser.parse_args(["--output-layer", "mixtape", "--embed-dim", "4", "--hidden-sizes", "4", *options.split()])
    args.arch = arch
    assert gates_of(args) == expected


def test_checkpoints_of_the_older_default_stay_as_they_were():
    """Those of fairseq-train hold r = .5 and no weight norm; those of fairseq-hydra-train only what was given."""
    older = {"output_layer": "mixtape", "embed_dim": 4, "hidden_sizes": "4"}
    for arch in ("awd_lstm_lm", "awd_lstm_lm_ptb"):
        of_train = argparse.Namespace(**older, arch=arch, frequent_ratio=0.5, gate_weight_norm=False)
        of_hydra = OmegaConf.create({**older, "_name": arch})
        assert gates_of(of_train) == gates_of(of_hydra) == (0.5, False)


def test_a_new_training_of_hydra_has_the_papers_gates_too():
    """What the task hands to the model is what a checkpoint keeps."""
    dictionary = make_dictionary(46)
    task = BpttLanguageModelingTask(BpttLanguageModelingConfig(), dictionary)
    given = {"_name": "awd_lstm_lm", "output_layer": "mixtape", "embed_dim": 4, "hidden_sizes": "4"}
    for more, expected in ({}, (0.1, True)), ({"frequent_ratio": 0.3}, (0.3, True)):
        tree = OmegaConf.create({**given, **more})
        config = task.build_model(tree).decoder.output_projection.config
        assert (config.frequent_ratio, config.gate_weight_norm) == expected
        again = task.build_model(tree, from_checkpoint=True).decoder.output_projection.config
        assert again == config


def test_the_size_of_one_layer_in_a_yaml_file_is_a_number():
    tree = OmegaConf.create({"hidden_sizes": 7})
    assert complete_options(tree, AWDLSTMConfig).hidden_sizes == "7" == tree.hidden_sizes


# --------------------------------------------------------------------------------------------------- evaluation


def test_reference_lstm_equals_torch():
    cell = torch.nn.LSTM(E, 7, batch_first=True).double()
    params = {name[: -len("_l0")]: parameter for name, parameter in cell.named_parameters()}
    x, h, c = [torch.randn(*shape, dtype=torch.float64) for shape in ((B, T, E), (B, 7), (B, 7))]
    outputs, (h_n, c_n) = cell(x, (h[None], c[None]))
    actual, state = reference_lm.lstm(params, x, (h, c))
    close((actual, *state), (outputs, h_n[0], c_n[0]))


@pytest.mark.parametrize("untied", [False, True])
@pytest.mark.parametrize("name", OUTPUT_LAYERS)
def test_evaluation_equals_reference(name, untied):
    model = sharpen(build(name, "--untie-embeddings" if untied else "", **dict.fromkeys(DROPOUTS, 0.5))).eval()
    layer, tokens, target = model.decoder.output_projection, random_tokens(), random_tokens()
    assert (layer.weight is model.decoder.embed_tokens.weight) != untied
    features, last_hidden, _ = reference_lm.awd_lstm(*parameters_of(model), tokens)
    actual, extra = model(tokens, features_only=True)
    close((actual, extra["last_hidden"]), (features, last_hidden))
    assert extra["attn"] == [None]
    scores, extra = model(tokens)
    expected = expected_log_probs(model, features)
    close(F.log_softmax(scores, dim=-1), expected)
    log_probs = model.get_normalized_probs((scores, extra), log_probs=True)  # fairseq's, in float32
    torch.testing.assert_close(log_probs, expected.to(log_probs.dtype))

    loss = layer.loss(actual, target)[0]
    expected_loss = F.nll_loss(expected.flatten(0, 1), target.flatten(), reduction="sum")
    close(loss, expected_loss)
    parameters = list(model.parameters())
    close(torch.autograd.grad(loss, parameters), torch.autograd.grad(expected_loss, parameters))


def test_gradients_equal_finite_differences():
    """A few entries of each parameter, by central differences of the reference."""
    model = sharpen(build()).eval()
    tokens, target = random_tokens(), random_tokens()

    def reference_loss():
        with torch.no_grad():
            features, _, _ = reference_lm.awd_lstm(*parameters_of(model), tokens)
            return F.nll_loss(expected_log_probs(model, features).flatten(0, 1), target.flatten(), reduction="sum")

    model.decoder.output_projection.loss(model(tokens, features_only=True)[0], target)[0].backward()
    step = 1e-5
    for parameter in model.parameters():
        values = parameter.data.view(-1)
        for entry in torch.randint(len(values), (3,)).tolist():
            value, losses = values[entry].item(), []
            for sign in (1, -1):
                values[entry] = value + sign * step
                losses.append(reference_loss())
            values[entry] = value
            difference = (losses[0] - losses[1]) / (2 * step)
            torch.testing.assert_close(parameter.grad.view(-1)[entry], difference, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("lengths", [[1] * T, [2, 1, 3], [T]])
@pytest.mark.parametrize("name", ["softmax", "mixtape"])
def test_segments_equal_the_whole_sequence(name, lengths):
    model, tokens = sharpen(build(name)).eval(), random_tokens()
    whole = model(tokens)[0]
    pieces = [model(piece, first_segment=n == 0)[0] for n, piece in enumerate(tokens.split(lengths, dim=1))]
    close(torch.cat(pieces, dim=1), whole)


def test_state_is_carried_detached_and_zeroed():
    model, (first, second) = sharpen(build()), random_tokens(2, B, T)
    embedding, layers = parameters_of(model)
    model(first)
    states = model.decoder.states[""]
    _, _, expected = reference_lm.awd_lstm(embedding, layers, first)
    assert len(states) == len(layers)
    for state, expected_state in zip(states, expected):
        close(tuple(state), tuple(x.detach() for x in expected_state))
        assert not any(x.requires_grad for x in state)

    # The second segment starts there, and no gradient flows into the first.
    carried = [tuple(x.detach() for x in state) for state in expected]
    features = model(second, first_segment=False, features_only=True)[0]
    expected_features, _, _ = reference_lm.awd_lstm(embedding, layers, second, carried)
    close(features, expected_features)
    parameters = [embedding, *(parameter for layer in layers for parameter in layer.values())]
    gradients = [torch.autograd.grad(weighted(x), parameters) for x in (features, expected_features)]
    close(*gradients)
    unseen = [token for token in first.unique().tolist() if token not in second]
    assert unseen and not gradients[0][0][unseen].any()

    # An epoch's first segment starts from zeros, whatever was before.
    model(second, first_segment=True)
    _, _, expected = reference_lm.awd_lstm(embedding, layers, second)
    for state, expected_state in zip(model.decoder.states[""], expected):
        close(tuple(state), tuple(x.detach() for x in expected_state))


def test_streams_do_not_disturb_each_other():
    """Validation in the middle of an epoch, with other columns, between two segments of training."""
    model, (first, second) = sharpen(build()).eval(), random_tokens(2, B, T)
    valid = random_tokens(5, 4)
    model(first, stream="train")
    expected = model(second, stream="train", first_segment=False)[0]
    expected_valid = model(valid, stream="valid")[0]

    model(first, stream="train")
    close(model(valid[:, :2], stream="valid")[0], expected_valid[:, :2])
    close(model(second, stream="train", first_segment=False)[0], expected)
    close(model(valid[:, 2:], stream="valid", first_segment=False)[0], expected_valid[:, 2:])
    assert {"train", "valid"} <= set(model.decoder.states)
    with pytest.raises(UserError, match="hidden state of train has 3 columns, and its next segment 2:"):
        model(second[:2], stream="train", first_segment=False)


def test_a_segment_whose_state_was_not_kept_starts_from_zeros_with_a_warning(caplog):
    model, tokens = build().eval(), random_tokens()
    expected = model(tokens, stream="whole")[0]
    assert not caplog.records
    assert torch.equal(model(tokens, stream="valid", first_segment=False)[0], expected)
    assert [record.getMessage() for record in caplog.records] == [
        "no hidden state was kept for valid: it starts from zeros in the middle of the text"
    ]
    model(tokens, stream="valid", first_segment=False)  # by now there is one
    assert len(caplog.records) == 1


def test_columns_do_not_disturb_each_other():
    model, tokens = sharpen(build()).eval(), random_tokens()
    whole = model(tokens)[0]
    for column in range(B):
        close(model(tokens[column, None])[0][0], whole[column])


@pytest.mark.parametrize("name", OUTPUT_LAYERS)
def test_incremental_decoding_equals_the_whole_sequence(name):
    """One token at a time as a generator asks, its hypotheses reordered on the way; the streams stay untouched."""
    model, tokens = sharpen(build(name)).eval(), random_tokens()
    model(random_tokens(), stream="")
    before = [[x.clone() for x in state] for state in model.decoder.states[""]]
    state = {}
    order = torch.tensor([2, 2, 0])
    for t in range(T):
        if t == 3:
            model.decoder.reorder_incremental_state_scripting(state, order)
            tokens = torch.cat([tokens[order, :t], tokens[:, t:]], dim=1)
        scores = model.decoder(tokens[:, : t + 1], incremental_state=state)[0]
        assert scores.shape == (B, 1, V)
        features, _, _ = reference_lm.awd_lstm(*parameters_of(model), tokens[:, : t + 1])
        close(F.log_softmax(scores, dim=-1), expected_log_probs(model, features[:, -1:]))
    close([list(state) for state in model.decoder.states[""]], before)


# ----------------------------------------------------------------------------------------------------- dropouts


def trace(model, tokens, **options):
    """A forward of features, and what goes into and comes out of each layer: [(input, output), ...]."""
    layers = []
    hooks = [
        layer.register_forward_hook(lambda _, inputs, outputs: layers.append((inputs[0], outputs[0])))
        for layer in model.decoder.layers
    ]
    features, extra = model(tokens, features_only=True, **options)
    for hook in hooks:
        hook.remove()
    return features, extra["last_hidden"], layers


def locked_mask(after, before, p):
    """The factor between two [B, T, D] tensors as [B, 1, D]: 0 or 1/(1-p), one for all times."""
    factor = (after / before).detach()
    close(factor, factor[:, :1].expand_as(factor))
    kept = factor[:, :1] != 0
    close(factor[:, :1][kept], torch.full((int(kept.sum()),), 1 / (1 - p), dtype=torch.float64))
    return factor[:, :1]


def test_locked_dropouts():
    """Constant over time, different over the columns and from call to call; and each at its place."""
    rates = {"input": 0.3, "hidden": 0.4, "dropout": 0.6}
    model, tokens = (
        sharpen(build("mixtape", "--embed-dim 40 --hidden-sizes 50,60,70", **rates)).train(),
        random_tokens(),
    )
    masks = []
    for _ in range(2):
        features, last_hidden, layers = trace(model, tokens)
        close(last_hidden, layers[-1][1])
        pairs = [(layers[0][0], model.decoder.embed_tokens.weight[tokens], "input")]
        pairs += [(layers[n][0], layers[n - 1][1], "hidden") for n in (1, 2)]
        pairs += [(features, last_hidden, "dropout")]
        masks.append([locked_mask(after, before, rates[name]) for after, before, name in pairs])
        for mask, (_, _, name) in zip(masks[-1], pairs):
            assert (mask[0] != mask[1]).any()
            # The share of zeros in 3 x 40 draws or more: within 5 standard deviations of its rate.
            dropped, p = (mask == 0).double().mean().item(), rates[name]
            assert abs(dropped - p) < 5 * math.sqrt(p * (1 - p) / mask.numel())
    assert all((a != b).any() for a, b in zip(*masks))
    model.eval()
    features, last_hidden, layers = trace(model, tokens)
    assert torch.equal(features, last_hidden) and torch.equal(layers[1][0], layers[0][1])


def test_embedding_dropout_drops_whole_rows_of_the_input_alone():
    p = 0.4
    model = sharpen(build("softmax", vocab_size=200, embedding=p)).train()
    table, layer = model.decoder.embed_tokens.weight, model.decoder.output_projection
    tokens = torch.arange(200).repeat(2).view(4, 100)  # every token twice, in two columns
    before = table.detach().clone()
    features, _, layers = trace(model, tokens)
    factors = (layers[0][0] / table[tokens]).detach()
    close(factors, factors[..., :1].expand_as(factors))  # a row is dropped whole
    rows = factors[..., 0].flatten()
    close(rows[:200], rows[200:])  # and wherever its token stands
    dropped = rows[:200] == 0
    close(rows[:200][~dropped], torch.full((int((~dropped).sum()),), 1 / (1 - p), dtype=torch.float64))
    assert abs(dropped.double().mean() - p) < 5 * math.sqrt(p * (1 - p) / 200)

    assert layer.weight is table and torch.equal(table, before)
    close(layer.log_probs(features), expected_log_probs(model, features))  # nothing dropped here
    (gradient,) = torch.autograd.grad(weighted(features), [table])
    assert torch.equal(gradient.eq(0).all(-1), dropped)

    _, _, layers = trace(model, tokens)
    assert ((layers[0][0][..., 0].flatten()[:200] == 0) != dropped).any()
    _, _, layers = trace(model.eval(), tokens)
    assert torch.equal(layers[0][0], table[tokens])


def test_embedding_noise_is_normal_and_in_training_alone():
    """e_t + S·Normal(0, 1), another draw at every position; and no draw at all without it."""
    model = sharpen(build("softmax", "--embedding-noise 0.15", vocab_size=200))
    tokens = torch.arange(200).repeat(20).view(40, 100)
    table = model.decoder.embed_tokens.weight
    _, _, layers = trace(model.train(), tokens)
    noise = (layers[0][0] - table[tokens]).detach()
    assert noise.std().item() == pytest.approx(0.15, rel=0.05) and abs(noise.mean()) < 0.01
    assert (noise.abs() < 0.15).double().mean().item() == pytest.approx(0.683, abs=0.02)
    assert len(noise.unique()) == noise.numel()
    _, _, layers = trace(model.eval(), tokens)
    assert torch.equal(layers[0][0], table[tokens])
    model.decoder.embedding_noise = 0.0
    state = torch.get_rng_state()
    _, _, layers = trace(model.train(), tokens)
    assert torch.equal(layers[0][0], table[tokens]) and torch.equal(torch.get_rng_state(), state)
    with pytest.raises(UserError, match="--embedding-noise -1.0 is not allowed: 0 or more"):
        build("softmax", "--embedding-noise -1")


def weight_masks(model, features):
    """The factors on the hidden-to-hidden matrices: entries dropped are those with no gradient."""
    weights = [layer.weight_hh for layer in model.decoder.layers]
    gradients = torch.autograd.grad(weighted(features), weights, retain_graph=True)
    return [gradient != 0 for gradient in gradients]


def test_weight_drop_changes_the_result_and_the_gradient():
    """One mask a segment, on the hidden-to-hidden matrices alone; found from the gradient, checked by the reference."""
    p = 0.5
    model, tokens = sharpen(build(weight=p)), random_tokens()
    embedding, layers = parameters_of(model)
    parameters = [embedding, *(parameter for layer in layers for parameter in layer.values())]
    plain, _, _ = reference_lm.awd_lstm(embedding, layers, tokens)
    before = [parameter.detach().clone() for parameter in parameters]
    model.train()
    seen = []
    for _ in range(2):
        features = model(tokens, features_only=True)[0]
        masks = weight_masks(model, features)
        assert all(0 < mask.double().mean() < 1 for mask in masks)
        expected, _, _ = reference_lm.awd_lstm(
            embedding, layers, tokens, weight_masks=[mask.double() / (1 - p) for mask in masks]
        )
        close(features, expected)
        assert not torch.allclose(features, plain)
        losses = [weighted(x) for x in (features, expected, plain)]
        gradients = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses]
        close(gradients[0], gradients[1])
        assert not any(torch.allclose(ours, theirs) for ours, theirs in zip(gradients[0], gradients[2]))
        seen.append(masks)
    assert any((a != b).any() for a, b in zip(*seen))
    assert all(torch.equal(parameter, old) for parameter, old in zip(parameters, before))

    features = model.eval()(tokens, features_only=True)[0]
    close(features, plain)
    close(torch.autograd.grad(weighted(features), parameters), gradients[2])


def test_everything_at_once_equals_reference():
    """All dropouts of a training step: their masks read off, the forward and its gradient written out with them."""
    rates = {"dropout": 0.4, "input": 0.3, "hidden": 0.2, "embedding": 0.1, "weight": 0.5}
    model, tokens = sharpen(build("mixtape", "--embed-dim 9 --hidden-sizes 10,11", **rates)).train(), random_tokens()
    embedding, layers = parameters_of(model)
    torch.manual_seed(3)
    features, last_hidden, traced = trace(model, tokens)
    inputs = traced[0][0] / embedding[tokens]  # row mask x locked mask, which only their product shows
    alive = inputs.detach().amax(dim=-1, keepdim=True) / (1 / 0.9 / 0.7)
    row_mask = torch.zeros(V, 1, dtype=torch.float64)
    row_mask[tokens.flatten()] = alive.round().flatten(0, 1) / 0.9
    hidden_mask = locked_mask(traced[1][0], traced[0][1], 0.2)
    mask = locked_mask(features, last_hidden, 0.4)
    # What a dropped hidden unit of the first layer cannot show is in the gradient of the layer's own output.
    drops = [
        torch.autograd.grad(weighted(traced[n][1]), [layer["weight_hh"]], retain_graph=True)[0] != 0
        for n, layer in enumerate(layers)
    ]
    expected, expected_hidden, _ = reference_lm.awd_lstm(
        embedding,
        layers,
        tokens,
        row_mask=row_mask,
        input_masks=[(inputs.detach().amax(dim=1, keepdim=True) > 0).double() / 0.7, hidden_mask],
        weight_masks=[drop.double() / 0.5 for drop in drops],
        mask=mask,
    )
    close((features, last_hidden), (expected, expected_hidden))
    parameters = [embedding, *(parameter for layer in layers for parameter in layer.values())]
    close(*(torch.autograd.grad(weighted(x), parameters) for x in (features, expected)))


def test_a_shorter_output_dictionary_is_refused():
    task = build_task()
    task.target_dictionary = TruncatedDictionary(task.dictionary, 8)
    args = argparse.Namespace(embed_dim=8, hidden_sizes="12,10", gate_dim=5)
    with pytest.raises(UserError, match="^--output-dictionary-size 8 does not go with --arch awd_lstm_lm"):
        AWDLSTMLanguageModel.build_model(args, task)


@pytest.mark.parametrize("kind", [name for name in DROPOUTS if name != "context"])
def test_dropouts_are_retained(kind):
    """fairseq-generate --retain-dropout: two passes over the same words differ by each dropout, but not by noise."""
    tokens = random_tokens(2, 6)
    for modules, retained in (None, True), (["AWDLSTMDecoder", "WeightDropLSTM"], True), (["SoftmaxLayer"], False):
        model = build(**{kind: 0.5}, command="--embedding-noise 0.5").eval()
        assert torch.equal(model(tokens)[0], model(tokens)[0])
        model.make_generation_fast_(retain_dropout=True, retain_dropout_modules=modules)
        assert torch.equal(model(tokens)[0], model(tokens)[0]) != retained
    model = build(command="--embedding-noise 0.5").eval()
    model.make_generation_fast_(retain_dropout=True)
    assert torch.equal(model(tokens)[0], model(tokens)[0])


def test_weight_drop_lstm_alone():
    """A layer's expectation: the mean of W_hh's effect over many masks is W_hh's, each entry kept with 1 - p.

    At one step from a state, with only the candidate's gates nonzero, log((1+g)/(1-g)) / 2 = U h is linear in U.
    """
    torch.manual_seed(0)
    p, hidden, calls = 0.3, 4, 2000
    layer = WeightDropLSTM(E, hidden, weight_dropout=p).double().train()
    candidate = slice(2 * hidden, 3 * hidden)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        layer.weight_hh[candidate] = torch.randn(hidden, hidden)
        layer.weight_hh[candidate].clamp_(-1, 1)
    h, zero = torch.tensor([[1.0, -0.5, 0.25, 2.0]]).double(), torch.zeros(1, hidden).double()
    x = torch.zeros(1, 1, E).double()

    def effect():
        _, (_, c) = layer(x, (h, zero))  # c' = g / 2
        return torch.atanh(2 * c[0]).detach()

    terms = layer.weight_hh[candidate].detach() * h
    expected, deviation = terms.sum(-1), (terms.pow(2).sum(-1) * p / (1 - p)).sqrt()
    mean = torch.stack([effect() for _ in range(calls)]).mean(0)
    assert ((mean - expected).abs() < 5 * deviation / math.sqrt(calls)).all()
    layer.eval()
    close(effect(), expected)


def test_weight_drop_lstm_equals_torch_lstm():
    ours, theirs = WeightDropLSTM(E, 7), torch.nn.LSTM(E, 7, batch_first=True)
    assert {name: tuple(p.shape) for name, p in ours.named_parameters()} == {
        "weight_ih": (28, E),
        "weight_hh": (28, 7),
        "bias_ih": (28,),
        "bias_hh": (28,),
    }
    theirs.load_state_dict({f"{name}_l0": parameter for name, parameter in ours.state_dict().items()})
    x, h, c = torch.randn(B, T, E), torch.randn(B, 7), torch.randn(B, 7)
    outputs, (h_n, c_n) = theirs(x, (h[None], c[None]))
    actual, state = ours(x, (h, c))
    torch.testing.assert_close((actual, *state), (outputs, h_n[0], c_n[0]))


# ----------------------------------------------------------------------------------------------- initialisation


def assert_uniform(values, bound):
    """Of U(-bound, bound): its range filled, its mean and its second moment within 5 standard deviations."""
    values = values.detach().flatten() / bound
    n = len(values)
    assert values.abs().max() <= 1
    assert values.abs().max() > 1 - 20 / n
    assert values.mean().abs() < 5 * math.sqrt(1 / 3 / n)
    assert (values.pow(2).mean() - 1 / 3).abs() < 5 * math.sqrt(4 / 45 / n)


@pytest.mark.parametrize("untied", [False, True])
@pytest.mark.parametrize("name", OUTPUT_LAYERS)
def test_initialisation(name, untied):
    sizes = (40, 50, 60 if OUTPUT_LAYERS[name].has_projection else 30)
    command = f"--embed-dim 30 --hidden-sizes {','.join(map(str, sizes))} --gate-dim 20"
    model = build(name, command + " --untie-embeddings" * untied, vocab_size=300)
    layer = model.decoder.output_projection
    assert [len(x.bias_hh) // 4 for x in model.decoder.layers] == list(sizes)
    assert [x.weight_ih.shape[1] for x in model.decoder.layers] == [30, *sizes[:-1]]
    assert_uniform(model.decoder.embed_tokens.weight, 0.1)
    assert_uniform(layer.weight, 0.1)
    assert not layer.bias.any()
    for lstm, size in zip(model.decoder.layers, sizes):
        for parameter in lstm.parameters():
            assert_uniform(parameter, 1 / math.sqrt(size))
    linear = ["context.weight", "context.bias", "prior.weight", "gate_hidden.weight", "gate_shared.weight"]
    parameters = dict(layer.named_parameters())
    found = [parameters[name] for name in linear if name in parameters]
    assert len(found) == {"mos": 3, "moc": 3, "mixtape": 4}.get(name, 0)
    for parameter in found:
        assert_uniform(parameter, 1 / math.sqrt(sizes[-1]))


@pytest.mark.parametrize("name", MIXTURES)
def test_masked_tokens_reach_the_output_layer(name):
    model, tokens = sharpen(build(name, masked_tokens=(0, 1, 3))).eval(), random_tokens()
    assert model.decoder.output_projection.masked_tokens == (0, 1, 3)
    probs = model.get_normalized_probs(model(tokens), log_probs=False)
    assert not probs[..., [0, 1, 3]].any()
    torch.testing.assert_close(probs.sum(-1), torch.ones(B, T, dtype=probs.dtype))


@pytest.mark.parametrize("untied", [False, True])
def test_softmax_needs_features_as_wide_as_its_embedding(untied):
    """Tied, --embed-dim must be the last hidden size; untied it is free."""
    command = f"--embed-dim 9 --hidden-sizes 8,7 {'--untie-embeddings' if untied else ''}"
    if untied:
        assert build("softmax", command)(random_tokens())[0].shape == (B, T, V)
    else:
        with pytest.raises(UserError, match="9.*7|7.*9"):
            build("softmax", command)
