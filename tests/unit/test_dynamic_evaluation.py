"""Static evaluation, which counts every token, and dynamic evaluation against an update written out by hand."""

import math

import pytest
import reference_lm
import torch
from toy_language_models import EOS, ToyTask, V, build, predict_by_hand, random_text, repetitive_text

from mixtape_plugin.errors import UserError
from mixtape_plugin.evaluation import language_model
from mixtape_plugin.evaluation.dynamic_evaluation import (
    PAPER_SETTINGS,
    dynamic_evaluation,
    gradient_statistics,
    gradients_without_dropout,
)
from mixtape_plugin.evaluation.language_model import perplexity
from mixtape_plugin.output_layers import OUTPUT_LAYERS, base


def copy_of(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_unchanged(model, before):
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name


# ---------------------------------------------------------------------------------------------- static evaluation


@pytest.mark.parametrize("name", OUTPUT_LAYERS)
def test_perplexity_is_the_sum_by_hand(name):
    tokens = random_text(23)
    model = build(name)
    log_probs, _, _ = predict_by_hand(copy_of(model), name, torch.tensor([[EOS, *tokens[:-1]]]), None)
    expected = -sum(log_probs[t, token].item() for t, token in enumerate(tokens))
    score = perplexity(model, ToyTask(test=tokens), "test")
    assert score.tokens == 23
    assert score.nll == pytest.approx(expected, rel=1e-12)
    assert score.perplexity == pytest.approx(math.exp(expected / 23), rel=1e-12)


@pytest.mark.parametrize("columns", [1, 4, 10])
def test_perplexity_counts_every_token_whatever_the_segment_length(columns):
    model, task, seen = build("mixtape"), ToyTask(test=random_text(103)), []
    scores = [perplexity(model, task, "test", columns, length, seen.append) for length in (1, 7, 35, 70)]
    assert [score.tokens for score in scores] == [103] * 4 and sum(seen) == 4 * 103
    for score in scores[1:]:
        assert score.nll == pytest.approx(scores[0].nll, rel=1e-12)


def test_a_score_is_summed_in_float64():
    """An odd number that float32 has not."""
    assert language_model.score(torch.tensor([-(2.0**24)] + [-1.0] * 7)).nll == 2**24 + 7


def test_perplexity_in_chunks_is_the_same(monkeypatch):
    model, task = build("mos"), ToyTask(test=random_text(103))
    whole = perplexity(model, task, "test", columns=3)
    monkeypatch.setattr(base, "MAX_SCORES", 7 * model.decoder.output_projection.scores_per_token)
    calls, log_probs = [], model.decoder.output_projection.log_probs
    monkeypatch.setattr(
        model.decoder.output_projection,
        "log_probs",
        lambda features: calls.append(len(features)) or log_probs(features),
    )
    chunked = perplexity(model, task, "test", columns=3)
    assert max(calls) == 7 and sum(calls) == chunked.tokens == whole.tokens == 103
    assert chunked.nll == pytest.approx(whole.nll, rel=1e-12)


# --------------------------------------------------------------------------------------------- dynamic evaluation


def statistics_by_hand(model, name, tokens, columns, length):
    """MS = sqrt(sum of squared gradients of the batches' mean NLL), decay rate = MS / sum of its means."""
    parameters = {key: value.requires_grad_() for key, value in copy_of(model).items()}
    squares, states, batches = {key: torch.zeros_like(value) for key, value in parameters.items()}, None, 0
    positions = reference_lm.cut(tokens, columns, training=True)
    for begin in range(0, len(positions[0]), length):
        pairs = [column[begin : begin + length] for column in positions]
        inputs = torch.tensor([[EOS if i < 0 else tokens[i] for i, _ in column] for column in pairs])
        targets = [tokens[i] for column in pairs for _, i in column]
        log_probs, _, states = predict_by_hand(parameters, name, inputs, states)
        states = [tuple(part.detach() for part in state) for state in states]
        mean_nll = -sum(log_probs[n, target] for n, target in enumerate(targets)) / len(targets)
        gradients = torch.autograd.grad(mean_nll, list(parameters.values()))
        for key, gradient in zip(parameters, gradients):
            squares[key] += gradient**2
        batches += 1
    root = {key: square**0.5 for key, square in squares.items()}
    total = sum(value.sum().item() / value.numel() for value in root.values())
    return root, {key: value / total for key, value in root.items()}, batches


def evaluate_by_hand(model, name, tokens, root, rate, learning_rate, decay, epsilon, length):
    """θ += λ·decrate·(θ0 − θ) − η·g/(MS + ε), decrate at most 1/λ, after each segment has been scored."""
    trained = copy_of(model)
    parameters, states, nll = dict(trained), None, 0.0
    inputs = [EOS, *tokens[:-1]]
    for begin in range(0, len(tokens), length):
        now = slice(begin, begin + length)
        parameters = {key: value.detach().requires_grad_() for key, value in parameters.items()}
        log_probs, _, states = predict_by_hand(parameters, name, torch.tensor([inputs[now]]), states)
        states = [tuple(part.detach() for part in state) for state in states]
        losses = [-log_probs[n, target] for n, target in enumerate(tokens[now])]
        nll += sum(loss.item() for loss in losses)
        gradients = torch.autograd.grad(sum(losses) / len(losses), list(parameters.values()))
        for key, gradient in zip(list(parameters), gradients):
            value = parameters[key].detach()
            rates = rate[key] if decay == 0 else rate[key].clamp(max=1 / decay)
            pull = decay * rates * (trained[key] - value)
            parameters[key] = value + pull - learning_rate * gradient / (root[key] + epsilon)
    return nll


@pytest.mark.parametrize("name", OUTPUT_LAYERS)
def test_statistics_equal_those_by_hand(name):
    tokens = random_text(46)  # 4 columns of 11, so 3, 3, 3 and 2 steps; 2 tokens are left over
    model = build(name)
    before = copy_of(model)
    root, rate, batches = statistics_by_hand(model, name, tokens, 4, 3)
    statistics = gradient_statistics(model, ToyTask(train=tokens), columns=4, length=3)
    assert (statistics.batches, statistics.tokens) == (batches, 44) == (4, 44)
    assert set(statistics.rms) == set(root)
    for key in root:
        torch.testing.assert_close(statistics.rms[key], root[key], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(statistics.decay_rate[key], rate[key], rtol=1e-9, atol=1e-12)
    assert_unchanged(model, before)


# The last one pulls most parameters back to where they were trained: the decay rate is clipped.
@pytest.mark.parametrize("name, decay", [*((name, 0.075) for name in OUTPUT_LAYERS), ("softmax", 0), ("softmax", 50.0)])
def test_dynamic_evaluation_equals_updates_by_hand(name, decay):
    model, train_tokens, tokens = build(name), random_text(46), random_text(33, seed=1)
    before, task = copy_of(model), ToyTask(train=train_tokens, test=tokens)
    root, rate, _ = statistics_by_hand(model, name, train_tokens, 4, 3)
    if decay == 50:
        assert 0 < sum((value * decay > 1).sum() for value in rate.values()) < sum(map(torch.numel, rate.values()))
    expected = evaluate_by_hand(model, name, tokens, root, rate, 0.2, decay, 0.01, length=5)
    statistics = gradient_statistics(model, task, columns=4, length=3)
    score = dynamic_evaluation(model, task, "test", statistics, 0.2, decay, 0.01)
    assert score.tokens == 33
    assert score.nll == pytest.approx(expected, rel=1e-9)
    assert abs(score.nll - perplexity(model, task, "test").nll) > 1e-4 * score.nll  # it did learn
    assert_unchanged(model, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", OUTPUT_LAYERS)
def test_without_learning_it_is_the_static_evaluation_exactly(name, dtype):
    model, task = build(name, dtype=dtype), ToyTask(train=random_text(300), test=random_text(103, seed=1))
    statistics = gradient_statistics(model, task, columns=10)
    with gradients_without_dropout(model):
        static = perplexity(model, task, "test", length=5)
    for decay in (0, 0.075):
        assert dynamic_evaluation(model, task, "test", statistics, 0, decay, 0.001) == static
    assert dynamic_evaluation(model, task, "test", statistics, 0.002, 0, 0.001) != static


def test_first_tokens_only():
    model, task = build(), ToyTask(train=random_text(300), test=random_text(103, seed=1))
    statistics = gradient_statistics(model, task, columns=10)
    score = dynamic_evaluation(model, task, "test", statistics, 0.002, 0.075, 0.001, max_tokens=20)
    start = dynamic_evaluation(
        model, ToyTask(test=random_text(103, seed=1)[:20]), "test", statistics, 0.002, 0.075, 0.001
    )
    assert score == start and score.tokens == 20


def test_parameters_that_run_away_give_infinity_and_come_back():
    model, task = build(dtype=torch.float32), ToyTask(train=random_text(300), test=random_text(103, seed=1))
    before = copy_of(model)
    statistics = gradient_statistics(model, task, columns=10)
    score = dynamic_evaluation(model, task, "test", statistics, 1e30, 0, 0.001)
    assert score.perplexity == math.inf
    assert_unchanged(model, before)


def test_parameters_come_back_after_an_error():
    model, task = build(), ToyTask(train=random_text(300), test=random_text(103, seed=1))
    before = copy_of(model)
    statistics = gradient_statistics(model, task, columns=10)

    def stop(tokens):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dynamic_evaluation(model, task, "test", statistics, 0.1, 0, 0.001, progress=stop)
    assert_unchanged(model, before)


def test_masked_tokens_stay_finite():
    model = build("mos", masked_tokens=(0, 1))
    task = ToyTask(train=random_text(300), test=random_text(103, seed=1))
    statistics = gradient_statistics(model, task, columns=10)
    score = dynamic_evaluation(model, task, "test", statistics, 0.002, 0.075, 0.001)
    assert math.isfinite(score.nll)
    assert (statistics.rms["decoder.output_projection.bias"] == 0).tolist() == [True] * 2 + [False] * (V - 2)


def test_useless_gradients_are_refused():
    model = build()
    with torch.no_grad():
        model.decoder.output_projection.bias[3] = torch.nan
    with pytest.raises(UserError, match="gradients of the train text are not finite"):
        gradient_statistics(model, ToyTask(train=random_text(300)), columns=10)
    with pytest.raises(UserError, match="5 tokens, too few for 100 columns"):
        gradient_statistics(model, ToyTask(train=random_text(5)))


@pytest.mark.parametrize("gradient", [0.0, 1e200])  # of the latter the square is infinite
def test_gradients_of_zero_or_infinity_are_refused(gradient, monkeypatch):
    model = build()
    loss = lambda features, targets: (gradient * features.sum(), None)  # noqa: E731
    monkeypatch.setattr(model.decoder.output_projection, "loss", loss)
    with pytest.raises(UserError, match="gradients of the train text are not finite, or all zero"):
        gradient_statistics(model, ToyTask(train=random_text(300)), columns=10)


def test_frozen_slopes_do_not_learn():
    model = build("plif", freeze_plif=True)
    task = ToyTask(train=random_text(300), test=random_text(103, seed=1))
    statistics = gradient_statistics(model, task, columns=10)
    names = {name for name, _ in model.named_parameters()}
    assert names - statistics.rms.keys() == {"decoder.output_projection.slopes_raw"}
    assert math.isfinite(dynamic_evaluation(model, task, "test", statistics, 0.002, 0.075, 0.001).nll)


def test_settings_of_the_papers():
    """Yang et al. 2018, table 9."""
    assert PAPER_SETTINGS["ptb"] == {"learning_rate": 0.002, "decay": 0.075, "epsilon": 0.001}
    assert PAPER_SETTINGS["wikitext2"] == {"learning_rate": 0.002, "decay": 0.02, "epsilon": 0.002}


def test_perplexity_falls_on_a_repetitive_text():
    """A model of random weights, trained for a few steps: the words of the moment are learned as they come."""
    torch.manual_seed(0)
    model = build("mos", std=0.1, dtype=torch.float32, dropout=0.0)
    train_tokens = repetitive_text(3000)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    streams = torch.tensor(train_tokens).view(30, 100)
    for _ in range(40):
        features, _ = model(streams[:, :-1], features_only=True)
        loss, _ = model.decoder.output_projection.loss(features, streams[:, 1:])
        optimizer.zero_grad()
        (loss / streams[:, 1:].numel()).backward()
        optimizer.step()
    task = ToyTask(train=train_tokens, test=repetitive_text(600, seed=9))
    statistics = gradient_statistics(model, task)
    score = dynamic_evaluation(model, task, "test", statistics, **PAPER_SETTINGS["ptb"])
    assert score.perplexity < 0.95 * perplexity(model, task, "test").perplexity


@pytest.mark.gpu
@pytest.mark.parametrize("name", OUTPUT_LAYERS)
def test_gpu_agrees_with_cpu(name):
    task = ToyTask(train=random_text(300), test=random_text(103, seed=1))
    scores = []
    for device in ("cpu", "cuda"):
        model = build(name).to(device)
        statistics = gradient_statistics(model, task, columns=10)
        scores.append(dynamic_evaluation(model, task, "test", statistics, 0.02, 0.075, 0.001).nll)
    assert scores[1] == pytest.approx(scores[0], rel=1e-9)


def test_first_tokens_end_with_a_segment():
    model, task = build(), ToyTask(train=random_text(300), test=random_text(103, seed=1))
    statistics = gradient_statistics(model, task, columns=10)
    for max_tokens, scored in [(1, 5), (18, 20), (20, 20), (21, 25), (102, 103), (1000, 103)]:
        assert dynamic_evaluation(model, task, "test", statistics, 0, 0, 0.001, max_tokens=max_tokens).tokens == scored


def test_a_loss_that_is_no_number_ends_the_evaluation():
    """In the second segment, after a step so large that no float32 loss is finite."""
    model, task = build(dtype=torch.float32), ToyTask(train=random_text(300), test=random_text(103, seed=1))
    statistics, seen = gradient_statistics(model, task, columns=10), []
    score = dynamic_evaluation(model, task, "test", statistics, 1e38, 0, 0.001, progress=seen.append)
    assert (score.nll, score.tokens, seen) == (math.inf, 10, [5])
