"""The continuous cache pointer against a loop over all pairs of tokens."""

import math

import pytest
import torch
from toy_language_models import EOS, ToyTask, V, build, predict_by_hand, random_text, repetitive_text

from mixtape_plugin import drawing
from mixtape_plugin.evaluation import cache_pointer as module
from mixtape_plugin.evaluation import grid_search
from mixtape_plugin.evaluation.cache_pointer import PAPER_SETTINGS, cache_log_probs, cache_pointer, mix, predict_text
from mixtape_plugin.evaluation.language_model import perplexity
from mixtape_plugin.output_layers import OUTPUT_LAYERS


def cache_by_hand(hidden, targets, t, theta, window):
    """p_cache over the vocabulary for target t (Grave et al. 2017, eq. 3), or None where nothing came before."""
    mass = [0.0] * V
    for i in range(max(t - window, 0), t):
        similarity = sum(a * b for a, b in zip(hidden[t], hidden[i]))
        mass[targets[i]] += math.exp(theta * similarity)
    return [m / sum(mass) for m in mass] if t else None


@pytest.fixture
def states():
    """Hidden states and the words that followed them, with ties of the words and none at the beginning."""
    hidden = torch.randn(29, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return hidden, torch.tensor(random_text(29))


@pytest.mark.parametrize("block", [1, 4, 512])
@pytest.mark.parametrize("theta, window", [(1.0, 500), (0.7, 28), (2.0, 5), (0.3, 1), (0.0, 10)])
def test_cache_is_the_sum_over_all_pairs(states, theta, window, block, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", block)
    hidden, targets = states
    seen = []
    actual = cache_log_probs(hidden, targets, theta, window, seen.append)
    assert sum(seen) == len(actual) == 29
    hidden, targets = hidden.tolist(), targets.tolist()
    assert actual[0] == -math.inf
    for t in range(1, 29):
        assert actual[t].exp().item() == pytest.approx(
            cache_by_hand(hidden, targets, t, theta, window)[targets[t]], rel=1e-12, abs=1e-300
        )
    assert (actual == -math.inf).any() and (actual > -math.inf).any()


def test_cache_sums_to_one(states):
    """Its probabilities of all words, each taken as the target of the last token in turn."""
    hidden, targets = states
    total = 0.0
    for word in range(V):
        targets[-1] = word
        total += cache_log_probs(hidden, targets, 0.7, 12)[-1].exp().item()
    assert total == pytest.approx(1, rel=1e-12)


def test_cache_does_not_overflow_and_keeps_float32():
    hidden = 40 * torch.randn(60, 8, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor(random_text(60))
    assert (hidden @ hidden.T).max() > 1000  # exp of it is infinite, in float64 too
    actual = cache_log_probs(hidden, targets, 1.0, 20)
    assert actual.dtype == torch.float32 and not actual.isnan().any() and (actual <= 1e-6).all()
    expected = cache_log_probs(hidden.double(), targets, 1.0, 20)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-3)
    assert cache_log_probs(hidden.half(), targets, 1.0, 20).dtype == torch.float32


def test_mixture_is_the_formula_and_the_first_token_is_the_vocabulary_s():
    vocabulary = torch.tensor([0.5, 0.2, 0.0, 0.3], dtype=torch.float64).log()
    cache = torch.tensor([0.0, 0.6, 0.5, 0.0], dtype=torch.float64).log()
    expected = torch.tensor([0.5, 0.75 * 0.2 + 0.25 * 0.6, 0.25 * 0.5, 0.75 * 0.3], dtype=torch.float64)
    torch.testing.assert_close(mix(vocabulary, cache, 0.25).exp(), expected, rtol=1e-12, atol=0)
    assert torch.equal(mix(vocabulary, cache, 0.0), vocabulary)


@pytest.mark.parametrize("name", OUTPUT_LAYERS)
def test_evaluation_equals_a_loop_by_hand(name):
    tokens, weight, theta, window = random_text(33), 0.3, 0.9, 8
    model = build(name)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        log_probs, hidden, _ = predict_by_hand(parameters, name, torch.tensor([[EOS, *tokens[:-1]]]), None)
    hidden, nll = hidden[0].tolist(), 0.0
    for t, token in enumerate(tokens):
        probability = log_probs[t, token].exp().item()
        if t > 0:
            cache = cache_by_hand(hidden, tokens, t, theta, window)
            probability = (1 - weight) * probability + weight * cache[token]
        nll -= math.log(probability)
    for length in (5, 70):
        predictions = predict_text(model, ToyTask(test=tokens), "test", length)
        score = cache_pointer(predictions, weight, theta, window)
        assert score.tokens == 33
        assert score.nll == pytest.approx(nll, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", OUTPUT_LAYERS)
def test_without_weight_it_is_the_static_evaluation_exactly(name, dtype):
    model, task = build(name, dtype=dtype), ToyTask(test=random_text(103))
    predictions = predict_text(model, task, "test")
    assert cache_pointer(predictions, 0.0, 1.0, 50) == perplexity(model, task, "test")
    assert cache_pointer(predictions, 0.1, 1.0, 50) != perplexity(model, task, "test")


def test_settings_of_the_papers():
    """Merity et al. 2018: of their README, and of their code."""
    assert PAPER_SETTINGS["ptb"] == {"weight": 0.1, "theta": 1.0, "window": 500}
    assert PAPER_SETTINGS["wikitext2"] == {"weight": 0.1279, "theta": 0.662, "window": 3785}


def test_perplexity_falls_on_a_repetitive_text():
    """Random weights: the model knows nothing, the cache what was said."""
    predictions = predict_text(build("mixtape"), ToyTask(test=repetitive_text(600)), "test")
    static = cache_pointer(predictions, 0.0, 1.0, 500).perplexity
    for settings in PAPER_SETTINGS.values():
        assert cache_pointer(predictions, **settings).perplexity < static
    assert cache_pointer(predictions, 0.1, 1.0, 30).perplexity < 0.8 * static  # of the 4 words of the moment


@pytest.mark.gpu
def test_gpu_agrees_with_cpu():
    task = ToyTask(test=random_text(1500))
    scores = [
        cache_pointer(predict_text(build("mos").to(device), task, "test"), 0.1, 1.0, 500).nll
        for device in ("cpu", "cuda")
    ]
    assert scores[1] == pytest.approx(scores[0], rel=1e-9)


def test_a_table_has_a_star_at_its_lowest_perplexity():
    lines = grid_search.table([{"theta": theta, "perplexity": p} for theta, p in [(1.0, 9.0), (2.0, 8.0), (3.0, 8.5)]])
    assert ["*" in line for line in lines.splitlines()] == [False, False, True, False]


def test_the_heat_map_has_the_best_of_the_other_hyper_parameters(monkeypatch, tmp_path):
    drawn = []
    texts = lambda figure, path: drawn.extend(text.get_text() for text in figure.axes[0].texts)  # noqa: E731
    monkeypatch.setattr(drawing, "save", texts)
    values = [(5, 0.1, 9.0), (5, 0.2, 6.0), (7, 0.1, 8.0), (7, 0.2, 7.0)]
    rows = [{"window": w, "theta": 1.0, "weight": share, "perplexity": p} for w, share, p in values]
    grid_search.draw(rows, tmp_path / "x.png", "theta", "weight", "")
    assert drawn == ["8.00", "6.00"]
