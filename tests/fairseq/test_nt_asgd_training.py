"""An epoch of a language model's training by NT-ASGD through fairseq-train, every step written out."""

import numpy as np
import pytest
import reference_lm
import torch
import torch.nn.functional as F
from conftest import USER_DIR, load_parameters, run
from fairseq.data import Dictionary

from mixtape_plugin.data.bptt_dataset import draw_segment_lengths

pytestmark = pytest.mark.slow

TRAINING = """
    --task bptt_language_modeling --tokens-per-sample 20 --batch-size 4 --batch-size-valid 7 --max-epoch 2 --seed 3
    --arch awd_lstm_lm --embed-dim 6 --hidden-sizes 7,6 --output-layer softmax
    --dropout 0 --input-dropout 0 --hidden-dropout 0 --embedding-dropout 0 --weight-dropout 0
    --criterion awd_lstm_cross_entropy --optimizer nt_asgd --lr 15 --clip-norm 0.15 --weight-decay 1e-2
    --cpu --num-workers 0 --log-format json
"""
EMBEDDING, BIAS = "decoder.embed_tokens.weight", "decoder.output_projection.bias"
LSTM = [[f"decoder.layers.{n}.{name}" for name in reference_lm.LSTM_PARAMETERS] for n in range(2)]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Folder of a binarized text, its tokens and its dictionary; train and valid are the same."""
    folder = tmp_path_factory.mktemp("text")
    words = torch.randint(20, (30, 15), generator=torch.Generator().manual_seed(0)).tolist()
    lines = [[f"w{word}" for word in line] for line in words]
    (folder / "text").write_text("".join(" ".join(line) + "\n" for line in lines))
    prefixes = ["--trainpref", folder / "text", "--validpref", folder / "text"]
    run("preprocess", "--only-source", "--padding-factor", 1, "--destdir", folder / "bin", *prefixes)
    dictionary = Dictionary.load(str(folder / "bin" / "dict.txt"))
    return folder / "bin", [dictionary.index(word) for line in lines for word in [*line, "</s>"]], dictionary


def walk(weights, text, segment, states=None):
    """The reference's network over [B, T] positions of the text: each target's NLL, the features, the new states."""
    _, tokens, dictionary = text
    inputs = torch.tensor([[dictionary.eos() if i < 0 else tokens[i] for i, _ in column] for column in segment])
    targets = torch.tensor([[tokens[t] for _, t in column] for column in segment])
    layers = [{name.split(".")[-1]: weights[name] for name in layer} for layer in LSTM]
    features, _, states = reference_lm.awd_lstm(weights[EMBEDDING], layers, inputs, states)
    logits = features @ weights[EMBEDDING].T + weights[BIAS]
    logits[..., [dictionary.bos(), dictionary.pad()]] = -torch.inf
    nll = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return nll, features, [(h.detach(), c.detach()) for h, c in states]


@pytest.mark.parametrize("averaging", [False, True])
def test_an_epoch_of_fairseq_train_is_that_of_the_formulas(averaging, text, tmp_path):
    """From the checkpoint of epoch 1 to that of epoch 2 and its validation, every step written out.

    The loss with AR and TAR per token, the gradient clipped, then the step with the lr of the segment's length; the
    state carried along, zero at first. The model validated and saved is the average, if there is one.
    """
    args = [text[0], "--user-dir", USER_DIR, "--save-dir", tmp_path, *TRAINING.split()]
    log = run("train", *args, *(["--averaging-epoch", 1] if averaging else [])).log
    start, end = ({**load_parameters(tmp_path / f"checkpoint{epoch}.pt")} for epoch in (1, 2))
    weights = {name: start[name].double().requires_grad_() for name in [EMBEDDING, BIAS, *LSTM[0], *LSTM[1]]}
    averaged = {name: reference_lm.AveragedSGD(w.detach().clone().numpy(), 1e-2) for name, w in weights.items()}
    cuts = reference_lm.cut(text[1], 4, training=True)
    states, begin, factors = None, 0, []
    for length in draw_segment_lengths(len(cuts[0]), 20, seed=3, epoch=2):
        segment = [cut[begin : begin + length] for cut in cuts]
        begin += length
        nll, features, states = walk(weights, text, segment, states)
        loss = nll.mean() + reference_lm.activation_regularization(features, 2.0)
        loss = loss + reference_lm.temporal_activation_regularization(features, 1.0)
        gradients = torch.autograd.grad(loss, weights.values())
        norm = sum(gradient.pow(2).sum().item() for gradient in gradients) ** 0.5
        factors.append(min(1.0, 0.15 / norm))
        for (name, weight), gradient in zip(weights.items(), gradients):
            gradient, lr = gradient.numpy() * factors[-1], 15 * length / 20
            averaged[name].step(gradient, lr)
            sgd = reference_lm.sgd_step(weight.detach().numpy(), gradient, lr, 1e-2)
            weight.data = torch.from_numpy(averaged[name].weight if averaging else sgd)
    assert min(factors) < 0.9, "the clipping had something to do"

    def valid_bits(weights):
        columns = reference_lm.cut(text[1], 7, training=False)
        nll = torch.cat([walk(weights, text, [column])[0] for column in columns])
        assert len(nll) == len(text[1])
        return nll.mean().item() / np.log(2)

    raw = {name: weight.detach() for name, weight in weights.items()}
    average = {name: torch.from_numpy(each.average) for name, each in averaged.items()}
    for name, weight in (average if averaging else raw).items():
        torch.testing.assert_close(end[name].double(), weight, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(end[name], start[name], rtol=1e-2, atol=1e-3)
    expected = valid_bits(average if averaging else raw)
    assert not averaging or abs(expected - valid_bits(raw)) > 0.005
    assert float(log["valid"][-1]["valid_nll_loss"]) == pytest.approx(expected, abs=0.001)  # rounded to three places
