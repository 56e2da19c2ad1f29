"""The dialog model in float64: what it reads, step by step as at once, batches as single contexts, any output layer."""

from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from conftest import LAYERS, left_padded, right_padded
from fairseq.data import Dictionary
from fairseq.sequence_generator import SequenceGenerator
from torch import nn

from mixtape_plugin.criterions.output_layer_cross_entropy import OutputLayerCrossEntropy
from mixtape_plugin.errors import UserError
from mixtape_plugin.models.dialog_seq2seq import DialogSeq2SeqModel

SMALL = dict(embed_dim=6, utterance_hidden_size=5, context_hidden_size=7, decoder_hidden_size=8, gate_dim=4)
NETWORKS = [(encoder, cell) for encoder in ("hierarchical", "flat") for cell in ("gru", "lstm")]


def make_dictionary(num_words=30, marks=("<me>", "<other>", "<d>")):
    """Ordered by frequency, the marks last, as prepare.sh writes it."""
    dictionary = Dictionary()
    for n in range(num_words):
        dictionary.add_symbol(f"w{n}", n=num_words - n)
    for mark in marks:
        dictionary.add_symbol(mark, n=0)
    return dictionary


DICTIONARY = make_dictionary()
PAD, EOS = DICTIONARY.pad(), DICTIONARY.eos()
CONTEXTS = [
    "<other> <d> <me> w1 w2 w3 <me> w4 <other> w5 w6 w7 w8 w9",
    "<other> <d>",
    "<me> w3 <other> <me> w1 w1",  # with an utterance of no words
    "w7 w8 <other> w9",  # words before the first mark
    "",
]
RESPONSES = ["w1 w2", "w9 w8 w7 w6 w5 w4", "", "w20 w3 w3 w11", "w5"]


def encode(lines):
    return [DICTIONARY.encode_line(line, add_if_not_exist=False).tolist() for line in lines]


def build_model(dictionary=DICTIONARY, seed=1, **args):
    torch.manual_seed(seed)
    task = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    return DialogSeq2SeqModel.build_model(Namespace(**args), task)


def build_small_model(**args):
    """Small, in float64, with weights large enough for sharp distributions."""
    model = build_model(**{**SMALL, **args}).double().eval()
    for parameter in model.parameters():
        parameter.data.mul_(20)
    return model


def make_sample(numbers):
    """A batch of fairseq: sources padded on the left, targets on the right."""
    sources, targets = ([encode(texts)[n] for n in numbers] for texts in (CONTEXTS, RESPONSES))
    return {
        "net_input": {
            "src_tokens": left_padded(sources, PAD),
            "src_lengths": torch.tensor([len(source) for source in sources]),
            "prev_output_tokens": right_padded([[EOS] + target[:-1] for target in targets], PAD),
        },
        "target": right_padded(targets, PAD),
        "ntokens": sum(map(len, targets)),
    }


def read_by_hand(model, line):
    """The encoder's vector for one context, word by word through the cells: nothing packed, nothing padded."""

    def run(rnn, suffix, inputs):
        cell = (nn.LSTMCell if isinstance(rnn, nn.LSTM) else nn.GRUCell)(rnn.input_size, rnn.hidden_size).double()
        cell.load_state_dict({f"{kind}_{part}": getattr(rnn, f"{kind}_{part}_l0{suffix}") for kind in ("weight", "bias")
                              for part in ("ih", "hh")})  # fmt: skip
        state = None
        for x in inputs:
            state = cell(x[None], state)
        return (state[0] if isinstance(state, tuple) else state)[0]

    encoder = model.encoder
    words = [*line.split(), "</s>"]
    vectors = {word: encoder.embed_tokens.weight[DICTIONARY.index(word)] for word in words}
    if encoder.utterance_rnn is None:
        return run(encoder.context_rnn, "", [vectors[word] for word in words])
    utterances = []
    for word in words:
        if word in ("<me>", "<other>") or not utterances:
            utterances.append([])
        utterances[-1].append(word)
    inputs = []
    for utterance in utterances:
        x = [vectors[word] for word in utterance]
        floor = [0.0, 1.0] if utterance[0] == "<me>" else [1.0, 0.0]
        both = [run(encoder.utterance_rnn, "", x), run(encoder.utterance_rnn, "_reverse", x[::-1])]
        inputs.append(torch.cat([*both, torch.tensor(floor, dtype=torch.float64)]))
    return run(encoder.context_rnn, "", inputs)


@pytest.mark.parametrize("context_encoder, cell", NETWORKS)
def test_encoder_reads_utterances(context_encoder, cell):
    model = build_small_model(context_encoder=context_encoder, cell=cell)
    net_input = make_sample(range(5))["net_input"]
    with torch.no_grad():
        found = model.encoder(net_input["src_tokens"], net_input["src_lengths"])["context"]
        expected = torch.stack([read_by_hand(model, line) for line in CONTEXTS])
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert (torch.pdist(expected) > 1e-3).all()  # the contexts are told apart
    with torch.no_grad():  # padded on the right, as by --left-pad-source False
        tokens = right_padded(encode(CONTEXTS), PAD)
        torch.testing.assert_close(model.encoder(tokens)["context"], expected, rtol=1e-10, atol=1e-12)


def test_no_gradient_is_copied_for_each_utterance():
    """Padding them one by one would do that: a backward pass took time that grew with the square of their number."""
    model = build_small_model(context_encoder="hierarchical", cell="gru")
    context = model.encoder(make_sample(range(5))["net_input"]["src_tokens"])["context"]
    nodes, found = [context.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in found:
            found.add(node)
            nodes.extend(following for following, _ in node.next_functions)
    names = {node.name() for node in found}
    assert not any("CopySlices" in name for name in names) and any("Embedding" in name for name in names)


@pytest.mark.parametrize("output_layer", LAYERS)
@pytest.mark.parametrize("context_encoder, cell", NETWORKS)
def test_batch_equals_single_equals_step_by_step(context_encoder, cell, output_layer):
    model = build_small_model(context_encoder=context_encoder, cell=cell, output_layer=output_layer)
    net_input = make_sample(range(5))["net_input"]
    tokens = net_input["prev_output_tokens"]
    with torch.no_grad():
        whole, _ = model(**net_input)
        encoded, state = model.encoder(net_input["src_tokens"]), {}
        steps = [model.decoder(tokens[:, : t + 1], encoded, state)[0] for t in range(tokens.size(1))]
        assert all(step.size(1) == 1 for step in steps)
        torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=1e-10, atol=1e-10)
        for n in range(5):
            single, _ = model(**make_sample([n])["net_input"])
            torch.testing.assert_close(whole[n : n + 1, : single.size(1)], single, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("output_layer", ["softmax", "mos"])
@pytest.mark.parametrize("context_encoder, cell", NETWORKS)
def test_beam_search_of_a_batch_equals_single_contexts(context_encoder, cell, output_layer):
    model = build_small_model(context_encoder=context_encoder, cell=cell, output_layer=output_layer)
    generator = SequenceGenerator([model], DICTIONARY, beam_size=4, max_len_b=8, len_penalty=0)

    def search(numbers):
        net_input = make_sample(numbers)["net_input"]
        del net_input["prev_output_tokens"]
        return generator.generate([model], {"net_input": net_input})

    batch = search(range(5))
    assert len({round(float(found[0]["score"]), 3) for found in batch}) > 1, "the model looks at its context"
    for number, in_batch in enumerate(batch):
        (alone,) = search([number])
        assert [found["tokens"].tolist() for found in in_batch] == [found["tokens"].tolist() for found in alone]
        for found in in_batch:  # beams change places at each step: what was searched is what the whole gives
            source, output = torch.tensor([encode(CONTEXTS)[number]]), found["tokens"][None]
            previous = torch.cat([torch.tensor([[EOS]]), output[:, :-1]], dim=1)
            with torch.no_grad():
                log_probs = model(source, None, previous)[0].log_softmax(-1)
            forced = log_probs.gather(-1, output.unsqueeze(-1)).flatten().float()
            torch.testing.assert_close(found["positional_scores"], forced, rtol=1e-5, atol=1e-5)
            assert float(found["score"]) == pytest.approx(float(forced.sum()), rel=1e-5)  # of a sum, no mean


@pytest.mark.parametrize("output_layer", LAYERS)
def test_ensemble_is_the_mean_of_its_models(output_layer):
    """A GRU and an LSTM, a hierarchical and a flat encoder, two output layers in one beam search."""
    models = [
        build_small_model(output_layer="softmax", cell="gru"),
        build_small_model(output_layer=output_layer, cell="lstm", context_encoder="flat", seed=2),
    ]
    generator = SequenceGenerator(models, DICTIONARY, beam_size=3, max_len_b=6)
    net_input = make_sample(range(5))["net_input"]
    del net_input["prev_output_tokens"]
    for number, found in enumerate(generator.generate(models, {"net_input": net_input})):
        source, output = torch.tensor([encode(CONTEXTS)[number]]), found[0]["tokens"][None]
        previous = torch.cat([torch.tensor([[EOS]]), output[:, :-1]], dim=1)
        with torch.no_grad():
            probs = sum(model(source, None, previous)[0].softmax(-1) for model in models) / 2
        forced = probs.gather(-1, output.unsqueeze(-1)).flatten().log().float()
        torch.testing.assert_close(found[0]["positional_scores"], forced, rtol=1e-5, atol=1e-5)


def loss_and_gradients(model, numbers, criterion):
    model.zero_grad()
    loss, sample_size, logged = criterion(model, make_sample(numbers))
    loss.backward()
    return [loss.detach(), logged["nll_loss"], *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("output_layer", LAYERS)
@pytest.mark.parametrize("context_encoder, cell", NETWORKS)
def test_fused_equals_eager_and_padding_changes_nothing(context_encoder, cell, output_layer):
    criterion = OutputLayerCrossEntropy(SimpleNamespace(target_dictionary=DICTIONARY), sentence_avg=False).eval()
    args = dict(context_encoder=context_encoder, cell=cell, output_layer=output_layer)
    fused, eager = (build_small_model(**args, output_impl=impl) for impl in ("auto", "eager"))
    together = loss_and_gradients(fused, range(5), criterion)
    alone = zip(*(loss_and_gradients(fused, [number], criterion) for number in range(5)))
    for one, other, parts in zip(together, loss_and_gradients(eager, range(5), criterion), alone):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(one, sum(parts), rtol=1e-8, atol=1e-10)
    scores, _ = eager(**make_sample(range(5))["net_input"])
    target = make_sample(range(5))["target"]
    expected = nn.functional.cross_entropy(scores.flatten(0, 1), target.flatten(), ignore_index=PAD, reduction="sum")
    torch.testing.assert_close(together[0], expected.detach(), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_dropout_is_of_training_only(cell):
    model = build_small_model(cell=cell, dropout=0.5)
    net_input = make_sample(range(5))["net_input"]
    with torch.no_grad():
        assert torch.equal(model(**net_input)[0], model(**net_input)[0])
        model.train()
        assert not torch.equal(model(**net_input)[0], model(**net_input)[0])


@pytest.mark.parametrize("context_encoder, cell", NETWORKS)
def test_bfloat16(context_encoder, cell):
    """What --bf16 makes of the model; bfloat16 has 8 bits of mantissa."""
    criterion = OutputLayerCrossEntropy(SimpleNamespace(target_dictionary=DICTIONARY), sentence_avg=False).eval()
    args = dict(context_encoder=context_encoder, cell=cell, output_layer="mixtape")
    models = [build_small_model(**args) for _ in range(2)]
    for parameter in (p for model in models for p in model.parameters()):
        parameter.data.mul_(0.3)  # larger ones amplify what rounding changes
    models[1].bfloat16()
    expected, found = (loss_and_gradients(model, range(5), criterion) for model in models)
    torch.testing.assert_close(found[0].double(), expected[0], rtol=0.01, atol=0)
    for gradient, other in zip(found[2:], expected[2:]):  # of each parameter: in the same direction, of the same size
        assert nn.functional.cosine_similarity(gradient.double().flatten(), other.flatten(), dim=0) > 0.9
        assert 0.7 < gradient.double().norm() / other.norm() < 1.4


# Sizes of the recipe, and of its --small, V = 10,000; output layers of about as many parameters.
SMALL_NETWORK = dict(embed_dim=100, utterance_hidden_size=75, context_hidden_size=150, decoder_hidden_size=200)
TEN = dict(num_components=10)
FOUR = dict(num_components=4, gate_dim=64, frequent_ratio=0.1)
SIZES = [
    ("softmax", {}, {}, 10_043_600),
    ("mos", {}, dict(**TEN, output_embed_dim=300), 10_250_600),
    ("moc", {}, dict(**TEN, output_embed_dim=300), 10_250_600),
    ("mixtape", {}, dict(**FOUR, output_embed_dim=350), 10_250_192),
    ("softmax", SMALL_NETWORK, {}, 3_437_850),
    ("mos", SMALL_NETWORK, dict(**TEN, output_embed_dim=166), 3_433_510),
    ("moc", SMALL_NETWORK, dict(**TEN, output_embed_dim=166), 3_433_510),
    ("mixtape", SMALL_NETWORK, dict(**FOUR, output_embed_dim=175), 3_434_742),
]


@pytest.mark.parametrize("output_layer, network, options, expected", SIZES)
def test_numbers_of_parameters(output_layer, network, options, expected):
    dictionary = make_dictionary(10_000 - 4 - 3)
    model = build_model(dictionary, output_layer=output_layer, **network, **options)
    assert len(dictionary) == 10_000
    assert sum(parameter.numel() for parameter in model.parameters()) == expected
    layer = sum(parameter.numel() for parameter in model.decoder.output_projection.parameters())
    assert expected - layer == (1_427_850 if network else 6_033_600)


def test_initial_values():
    model = build_model(output_layer="softmax")
    layer = model.decoder.output_projection
    assert not layer.bias.any()
    for name, parameter in model.named_parameters():
        if name != "decoder.output_projection.bias":
            assert 0.07 < parameter.abs().max() <= 0.08, name
    assert model.encoder.embed_tokens is model.decoder.embed_tokens


def test_mistakes():
    def message(dictionary=DICTIONARY, **args):
        with pytest.raises(UserError) as raised:
            build_model(dictionary, **args)
        return str(raised.value)

    assert message(cell="rnn") == "--cell rnn is not allowed: gru or lstm"
    assert message(context_encoder="deep") == "--context-encoder deep is not allowed: hierarchical or flat"
    assert message(embed_dim=0) == "--embed-dim 0 is not allowed: at least 1"
    assert message(dropout=1.0) == "--dropout 1.0 is not allowed: from 0 to less than 1"
    assert "<me> and <other>, which this dictionary of 34 types lacks" in message(make_dictionary(marks=()))
    for mark in "<me>", "<other>":
        assert "which this dictionary of 35 types lacks" in message(make_dictionary(marks=(mark,)))
    build_model(make_dictionary(marks=()), context_encoder="flat")
    task = SimpleNamespace(source_dictionary=make_dictionary(5), target_dictionary=DICTIONARY)
    with pytest.raises(UserError, match="of 12 and 37 types differ: use fairseq-preprocess --joined-dictionary"):
        DialogSeq2SeqModel.build_model(Namespace(), task)
    task.source_dictionary = make_dictionary(29)  # as many types, of which one is another
    task.source_dictionary.add_symbol("other")
    with pytest.raises(UserError, match="of 37 and 37 types differ"):
        DialogSeq2SeqModel.build_model(Namespace(), task)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_dropout_is_of_words_on_both_sides_and_of_the_decoders_output(cell):
    model, inputs = build_small_model(cell=cell, dropout=0.5).train(), []
    for rnn in model.encoder.utterance_rnn, model.decoder.rnn:
        rnn.register_forward_hook(lambda _, args, output: inputs.append(getattr(args[0], "data", args[0])))
    with torch.no_grad():
        features, _ = model(**make_sample(range(5))["net_input"], features_only=True)
    assert len(inputs) == 2
    for dropped in [*inputs, features]:
        assert 0.35 < (dropped == 0).double().mean() < 0.65


def test_dropout_is_retained():
    """fairseq-generate --retain-dropout: two passes through the same batch differ by it."""
    model = build_small_model(dropout=0.5)
    batch = right_padded(encode(CONTEXTS), PAD), None, right_padded(encode(RESPONSES), PAD)
    scores = [model(*batch)[0] for _ in range(2)]
    assert torch.equal(*scores)
    model.make_generation_fast_(retain_dropout=True)
    scores = [model(*batch)[0] for _ in range(2)]
    assert not torch.equal(*scores)


def test_shared_gates_need_a_dictionary_by_frequency():
    dictionary = Dictionary()
    for n in range(20):
        dictionary.add_symbol(f"w{n}", n=n + 1)
    task = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    args = Namespace(output_layer="mixtape", frequent_ratio=0.5, context_encoder="flat")
    with pytest.raises(UserError, match="is not ordered by frequency"):
        DialogSeq2SeqModel.build_model(args, task)
