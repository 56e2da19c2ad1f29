"""The references themselves, checked against what can be known without them."""

from __future__ import annotations

import pytest
import reference
import torch
import torch.nn.functional as F

N, D, E, V, S, GATE_DIM = 5, 4, 3, 7, 4, 2
MIXTURES = {
    "mos": reference.mos_log_probs,
    "moc": reference.moc_log_probs,
    "mixtape": reference.mixtape_log_probs,
}


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def make_params(num_components, num_frequent=S, embed_dim=E):
    gates = num_components - 1
    return {
        "weight": rand(V, embed_dim),
        "bias": rand(V),
        "context.weight": rand(num_components * embed_dim, D),
        "context.bias": rand(num_components * embed_dim),
        "prior.weight": rand(num_components, D),
        "gate_hidden.weight": rand(gates * GATE_DIM, D),
        "gate_hidden.bias": rand(gates * GATE_DIM),
        "gate_embedding": rand(num_frequent, GATE_DIM),
        "gate_shared.weight": rand(gates, D),
        "gate_bias": rand(num_frequent, gates),
    }


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(1)


@pytest.mark.parametrize("num_components", range(2, 10))
def test_tree_priors_sum_to_one(num_components):
    priors = reference.tree_priors(torch.rand(6, num_components - 1, dtype=torch.float64))
    assert priors.shape == (6, num_components)
    torch.testing.assert_close(priors.sum(-1), torch.ones(6, dtype=torch.float64))


def test_tree_priors_small_cases():
    gates = torch.rand(2, 6, 4, dtype=torch.float64)
    g1, g2, g3, g4 = gates.unbind(-1)
    torch.testing.assert_close(reference.tree_priors(gates[..., :3]), reference.tree_priors_4(gates[..., :3]))
    torch.testing.assert_close(reference.tree_priors(gates[..., :1]), torch.stack([g1, 1 - g1], -1))
    three = torch.stack([g1 * g2, g1 * (1 - g2), 1 - g1], -1)
    torch.testing.assert_close(reference.tree_priors(gates[..., :2]), three)
    deepest_first = [g1 * g2 * g4, g1 * g2 * (1 - g4), g1 * (1 - g2), (1 - g1) * g3, (1 - g1) * (1 - g3)]
    torch.testing.assert_close(reference.tree_priors(gates), torch.stack(deepest_first, -1))


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_are_distributions_that_use_every_parameter(name):
    params = {key: value.float().requires_grad_() for key, value in make_params(3).items()}
    features = rand(N, D).requires_grad_()
    log_probs = MIXTURES[name](params, features, num_components=3)
    assert log_probs.dtype == torch.float64 and log_probs.shape == (N, V)
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(N, dtype=torch.float64))
    log_probs[:, 0].sum().backward()
    unused = {key for key, value in params.items() if value.grad is None or not value.grad.any()}
    assert unused == ({"prior.weight"} if name == "mixtape" else {key for key in params if key.startswith("gate")})
    assert features.grad.any()


@pytest.mark.parametrize("name", MIXTURES)
def test_equal_components_are_one_softmax(name):
    params = make_params(4)
    for key in ("context.weight", "context.bias"):
        params[key] = torch.cat([params[key][:E]] * 4)
    features, mask = rand(N, D), torch.tensor([2.0, 0.0, 2.0])
    context = torch.tanh(F.linear(features, params["context.weight"][:E], params["context.bias"][:E])) * mask
    expected = F.log_softmax(F.linear(context, params["weight"], params["bias"]), dim=-1)
    actual = MIXTURES[name](params, features, num_components=4, context_mask=mask.expand(N, 4, E))
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(reference.softmax_log_probs(params, context), expected)


def test_mos_and_moc_mix_probabilities_and_contexts():
    params, features = make_params(2), rand(N, D)
    prior = torch.sigmoid(features @ (params["prior.weight"][0] - params["prior.weight"][1]))[:, None]
    first, second = torch.tanh(F.linear(features, params["context.weight"], params["context.bias"])).split(E, dim=-1)
    probs = [F.softmax(F.linear(h, params["weight"], params["bias"]), dim=-1) for h in (first, second)]
    mos = reference.mos_log_probs(params, features, num_components=2)
    torch.testing.assert_close(mos.exp(), prior * probs[0] + (1 - prior) * probs[1])
    moc = reference.moc_log_probs(params, features, num_components=2)
    mixed = F.linear(prior * first + (1 - prior) * second, params["weight"], params["bias"])
    torch.testing.assert_close(moc, F.log_softmax(mixed, dim=-1))


def test_mixtape_gates_choose_each_tokens_component():
    params, features = make_params(4), rand(N, D)
    # Signs of (l_1, l_2, l_3) that lead to component x for the frequent token x, and to component 2 for the others.
    turns = torch.tensor([[1, 1, 0], [1, -1, 0], [-1, 0, 1], [-1, 0, -1]], dtype=torch.float64) * 1000
    chosen = [0, 1, 2, 3, 2, 2, 2]
    contexts = torch.tanh(F.linear(features, params["context.weight"], params["context.bias"])).view(N, 4, E)
    scores = (contexts[:, chosen] * params["weight"]).sum(-1) + params["bias"]
    noise = {"gate_noise_frequent": turns.expand(N, S, 3), "gate_noise_shared": turns[2].expand(N, 3)}
    expected = F.log_softmax(scores, dim=-1)
    torch.testing.assert_close(reference.mixtape_log_probs(params, features, num_components=4, **noise), expected)
    params["gate_bias"], noise["gate_noise_frequent"] = turns, None
    torch.testing.assert_close(reference.mixtape_log_probs(params, features, num_components=4, **noise), expected)


def test_mixtape_two_components_one_context_by_hand():
    params, g, gate_mask = make_params(2), rand(1, D), torch.tensor([[[0.0, 1.25]]])
    u = params["gate_hidden.weight"] / torch.linalg.vector_norm(params["gate_hidden.weight"], dim=1, keepdim=True)
    hidden = torch.tanh(u @ g[0] + params["gate_hidden.bias"]) * gate_mask[0, 0]
    first, second = torch.tanh(params["context.weight"] @ g[0] + params["context.bias"]).split(E)
    scores = []
    for x in range(V):
        gate = params["gate_shared.weight"][0] @ g[0]
        if x < S:
            gate = gate + params["gate_embedding"][x] @ hidden + params["gate_bias"][x, 0]
        mixed = torch.sigmoid(gate) * first + torch.sigmoid(-gate) * second
        scores.append(mixed @ params["weight"][x] + params["bias"][x])
    actual = reference.mixtape_log_probs(params, g, num_components=2, weight_norm=True, gate_mask=gate_mask)
    torch.testing.assert_close(actual[0], F.log_softmax(torch.stack(scores), dim=0))


@pytest.mark.parametrize("num_frequent", [0, V])
def test_mixtape_all_or_no_tokens_share(num_frequent):
    params, features = make_params(4, num_frequent), rand(N, D)
    with_sharing = dict(params, gate_embedding=torch.zeros(S, GATE_DIM), gate_bias=torch.zeros(S, 3))
    if num_frequent == V:  # without an own part every token's gate is the shared one
        params = dict(params, gate_embedding=torch.zeros(V, GATE_DIM), gate_bias=torch.zeros(V, 3))
    actual, expected = [reference.mixtape_log_probs(p, features, num_components=4) for p in (params, with_sharing)]
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 0.5])
def test_label_smoothed_loss_is_fairseqs(label_smoothing):
    from fairseq.criterions.label_smoothed_cross_entropy import label_smoothed_nll_loss

    log_probs, target = F.log_softmax(rand(N, V), dim=-1), torch.tensor([3, 1, 6, 1, 0])
    actual = reference.label_smoothed_loss(log_probs, target, label_smoothing, ignore_index=1)
    torch.testing.assert_close(actual, label_smoothed_nll_loss(log_probs, target, label_smoothing, ignore_index=1))


def test_label_smoothing_zero_is_nll_and_survives_zero_mass():
    scores, target = rand(N, V), torch.tensor([3, -100, 6, 2, 1])
    scores[:, 0] = -float("inf")
    log_probs = F.log_softmax(scores, dim=-1)
    expected = F.nll_loss(log_probs, target, ignore_index=-100, reduction="sum")
    for actual in reference.label_smoothed_loss(log_probs, target, 0.0, ignore_index=-100):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("causal", [False, True])
def test_relative_attention_with_zero_tables_is_attention(causal):
    query, key, value, zeros = rand(6, 4), rand(6, 4), rand(6, 4), torch.zeros(5, 4)
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=causal)
    actual = reference.relative_attention(query, key, value, zeros, zeros, k=2, causal=causal)
    torch.testing.assert_close(actual, expected)


def test_relative_attention_distances():
    zeros, tables = torch.zeros(3, 3), torch.eye(3, dtype=torch.float64)
    # Equal attention over one-hot distances: how often each query sees <= -1, 0, >= 1.
    counts = reference.relative_attention(zeros, zeros, zeros, zeros, tables, k=1, causal=False)
    expected = torch.tensor([[0, 1, 2], [1, 1, 1], [2, 1, 0]], dtype=torch.float64) / 3
    torch.testing.assert_close(counts, expected)
    causal = reference.relative_attention(zeros, zeros, zeros, zeros, tables, k=1, causal=True)
    torch.testing.assert_close(causal, torch.tensor([[0, 1, 0], [1 / 2, 1 / 2, 0], [2 / 3, 1 / 3, 0]]).double())
    # Odds 3 for the token before, 4 for the token after.
    odds, value = torch.tensor([[3.0], [1.0], [4.0]]).double(), torch.tensor([[0.0], [1.0]])
    ones, none = torch.ones(2, 1), torch.zeros(3, 1)
    attended = reference.relative_attention(ones, 0 * ones, value, odds.log(), none, k=1, causal=False)
    torch.testing.assert_close(attended, torch.tensor([[4 / 5], [1 / 4]]).double())
