"""The papers' formulas, typed out in float64 for tests to compare with: plain, slow, sharing nothing with the plugin.

MoS is Yang et al. 2018, "Breaking the Softmax Bottleneck"; Mixtape is Yang et al. 2019, "Mixtape: Breaking the Softmax
Bottleneck Efficiently"; SigSoftmax, GSS and LMS-PLIF are those of Parthiban et al. 2021. Logarithms are natural.
Parameters are a dict from the name inside a layer to its tensor; random draws are passed in, a dropout mask as the
factor itself (0 or 1/(1-p)), noise as the term itself (scaled).

Shapes: N contexts, D features, E embedding, K components, V vocabulary (M in the papers), S frequent tokens,
d2 gate size, T and J query and key positions, Dh head.
"""

from __future__ import annotations

import torch


def softmax_log_probs(params, features):
    """log p(x|c) of a softmax, MoS eq. 1 plus a bias; features [N, D] -> [N, V]. Here E = D."""
    params = _double(params)
    return torch.log_softmax(_logits(params, params.get("context_scale", 1) * features.double()), dim=-1)


def mos_log_probs(params, features, *, num_components, context_mask=None):
    """log sum_k pi_ck softmax(h_ck W^T + bias)_x, MoS sec. 2.4; features [N, D], context_mask [N, K, E] -> [N, V]."""
    params, features = _double(params), features.double()
    contexts = context_vectors(params, features, num_components, context_mask)
    log_prior = torch.log_softmax(features @ params["prior.weight"].T, dim=-1)
    terms = []
    for k in range(num_components):
        terms.append(log_prior[:, k, None] + torch.log_softmax(_logits(params, contexts[k]), dim=-1))
    return torch.logsumexp(torch.stack(terms), dim=0)


def moc_log_probs(params, features, *, num_components, context_mask=None):
    """log softmax((sum_k pi_ck h_ck) W^T + bias)_x, MoS eq. 2; features [N, D], context_mask [N, K, E] -> [N, V]."""
    params, features = _double(params), features.double()
    contexts = context_vectors(params, features, num_components, context_mask)
    prior = torch.softmax(features @ params["prior.weight"].T, dim=-1)
    mixed = torch.zeros_like(contexts[0])
    for k in range(num_components):
        mixed = mixed + prior[:, k, None] * contexts[k]
    return torch.log_softmax(_logits(params, mixed), dim=-1)


def sigsoftmax_log_probs(params, features):
    """log softmax of 2 l - ln(1 + exp(l)), which Parthiban et al. give for eq. 1; features [N, D] -> [N, V]."""
    params = _double(params)
    scores = _logits(params, params.get("context_scale", 1) * features.double())
    return torch.log_softmax(2 * scores - torch.logaddexp(scores, torch.zeros_like(scores)), dim=-1)


def sigsoftmax(scores):
    """exp(l) sigma(l) over its sum, Parthiban et al. eq. 1 as printed; scores [..., V], far below the 700 of exp."""
    weights = torch.exp(scores.double()) * torch.sigmoid(scores.double())
    return weights / weights.sum(dim=-1, keepdim=True)


def gss_log_probs(params, features, *, c, k):
    """log softmax of k(x - c) + c - (k - 1) softplus(x - c), Parthiban et al. eq. 3 and 5; [N, D] -> [N, V]."""
    params = _double(params)
    scores = _logits(params, params.get("context_scale", 1) * features.double())
    softplus = torch.logaddexp(scores - c, torch.zeros_like(scores))
    return torch.log_softmax(k * (scores - c) + c - (k - 1) * softplus, dim=-1)


def plif_log_probs(params, features, *, limit):
    """log softmax of the integral of a step function, piece by piece: its K steps over [-limit, limit] are
    log(1 + exp(slopes_raw)), and the first and the last go on beyond; [N, D] -> [N, V]."""
    params = _double(params)
    scores = _logits(params, params.get("context_scale", 1) * features.double())
    slopes = torch.log1p(torch.exp(params["slopes_raw"]))
    width, last = 2 * limit / len(slopes), len(slopes) - 1
    values = torch.zeros_like(scores)
    for j in range(len(slopes)):
        into_piece = scores - (j * width - limit)
        if j > 0:
            into_piece = torch.clamp(into_piece, min=0)
        if j < last:
            into_piece = torch.clamp(into_piece, max=width)
        values = values + slopes[j] * into_piece
    return torch.log_softmax(values, dim=-1)


def mixtape_log_probs(
    params,
    features,
    *,
    num_components,
    weight_norm=False,
    context_mask=None,
    gate_mask=None,
    gate_noise_frequent=None,
    gate_noise_shared=None,
):
    """log softmax_x(sum_k pi_cxk h_ck . w_x + bias_x), Mixtape eq. 2; features [N, D] -> [N, V].

    The gates are eq. 4 for the tokens x < S and eq. 6 for the rest, the priors eq. 3, the contexts eq. 5. Every token
    has its own row of priors here, as eq. 2 has it; the infrequent tokens' rows are just equal.
    context_mask [N, K, E] multiplies h_k, gate_mask [N, K-1, d2] multiplies tanh(U_k g);
    gate_noise_frequent [N, S, K-1] and gate_noise_shared [N, K-1] are added to the l of eq. 4 and 6.
    weight_norm divides each row of U_k by its norm (constant scale 1, the bias left alone).
    """
    params, features = _double(params), features.double()
    contexts = context_vectors(params, features, num_components, context_mask)
    num_frequent, gate_dim = params["gate_embedding"].shape
    frequent, shared = [], []
    for k in range(num_components - 1):
        rows = slice(k * gate_dim, (k + 1) * gate_dim)
        hidden_weight = params["gate_hidden.weight"][rows]
        if weight_norm:
            hidden_weight = hidden_weight / hidden_weight.pow(2).sum(dim=1, keepdim=True).sqrt()
        hidden = torch.tanh(features @ hidden_weight.T + params["gate_hidden.bias"][rows])
        if gate_mask is not None:
            hidden = hidden * gate_mask[:, k].double()
        shared_k = features @ params["gate_shared.weight"][k]
        frequent_k = hidden @ params["gate_embedding"].T + shared_k[:, None] + params["gate_bias"][:, k]
        if gate_noise_frequent is not None:
            frequent_k = frequent_k + gate_noise_frequent[:, :, k].double()
        if gate_noise_shared is not None:
            shared_k = shared_k + gate_noise_shared[:, k].double()
        frequent.append(frequent_k)
        shared.append(shared_k)
    frequent_priors = tree_priors(torch.sigmoid(torch.stack(frequent, dim=-1)))
    shared_priors = tree_priors(torch.sigmoid(torch.stack(shared, dim=-1)))
    num_rest = params["weight"].shape[0] - num_frequent
    priors = torch.cat([frequent_priors, shared_priors[:, None].expand(-1, num_rest, -1)], dim=1)
    scores = params["bias"].expand(len(features), -1)
    for k in range(num_components):
        scores = scores + priors[:, :, k] * (contexts[k] @ params["weight"].T)
    return torch.log_softmax(scores, dim=-1)


def log_probs_of(config, params, features, **draws):
    """The formula of a layer by its options; features [N, D] -> [N, V]."""
    options = {
        "mos": {"num_components": config.num_components},
        "moc": {"num_components": config.num_components},
        "mixtape": {"num_components": config.num_components, "weight_norm": config.gate_weight_norm},
        "gss": {"c": config.gss_c, "k": config.gss_k},
        "plif": {"limit": config.plif_range},
    }
    formula = globals()[f"{config.output_layer}_log_probs"]
    return formula(params, features, **options.get(config.output_layer, {}), **draws)


# Parameters with a row a token; the gates' have S of them.
ROWS = ("weight", "bias", "gate_embedding", "gate_bias")


def predicted_tokens(layer):
    """Those that a built layer does not mask, in order."""
    return [x for x in range(layer.vocab_size) if x not in layer.masked_tokens]


def layer_log_probs(layer, features, params=None, **draws):
    """The formula of a built layer, as that of one without the masked tokens; features [..., D] -> [N, V - masked].

    params are in place of the layer's own, by the same names.
    """
    allowed = predicted_tokens(layer)
    params = dict(layer.named_parameters() if params is None else params)
    for name in set(ROWS) & set(params):
        params[name] = params[name][[x for x in allowed if x < len(params[name])]]
    return log_probs_of(layer.config, params, features.flatten(0, -2), **draws)


def layer_loss(layer, features, target, label_smoothing=0.0, ignore_index=-100, params=None):
    """The label-smoothed loss of it and its unsmoothed part; features [..., D], target [...] -> two scalars."""
    allowed = predicted_tokens(layer)
    place = [-100 if x == ignore_index else allowed.index(x) for x in target.flatten().tolist()]
    log_probs = layer_log_probs(layer, features, params)
    return label_smoothed_loss(log_probs, torch.tensor(place), label_smoothing, -100)


def context_vectors(params, features, num_components, context_mask=None):
    """h_k = tanh(H_k g + b_k), Mixtape eq. 5 (MoS: W_{h,k}), times the scale, 1 in the papers, and times its mask;
    features [N, D] -> K tensors [N, E]."""
    embed_dim = params["weight"].shape[1]
    contexts = []
    for k in range(num_components):
        rows = slice(k * embed_dim, (k + 1) * embed_dim)
        context = torch.tanh(features @ params["context.weight"][rows].T + params["context.bias"][rows])
        context = params.get("context_scale", 1) * context
        contexts.append(context if context_mask is None else context * context_mask[:, k].double())
    return contexts


def tree_priors(gates):
    """pi from the sigmoid outputs gamma, Mixtape sec. 3.2, for any K >= 2; gates [..., K-1] -> [..., K].

    Node j of the heap has children 2j+1 (probability gamma_j) and 2j+2 (1 - gamma_j), nodes from K-1 on are leaves,
    and a prior is the product of the probabilities on the way from the root to its leaf. Leaves go left to right.
    """
    num_components = gates.shape[-1] + 1
    paths = []
    for leaf in range(num_components - 1, 2 * num_components - 1):
        path, node = [], leaf
        while node > 0:
            parent = (node - 1) // 2
            path.insert(0, (node == 2 * parent + 2, parent))  # (went right, from which node)
            node = parent
        paths.append(path)
    # In the order of the first turn that differs, left before right: depth first.
    paths.sort(key=lambda path: [went_right for went_right, _ in path])
    priors = []
    for path in paths:
        prior = torch.ones_like(gates[..., 0])
        for went_right, parent in path:
            prior = prior * (1 - gates[..., parent] if went_right else gates[..., parent])
        priors.append(prior)
    return torch.stack(priors, dim=-1)


def tree_priors_4(gates):
    """pi from the sigmoid outputs gamma for K = 4, Mixtape eq. 3 as printed; gates [..., 3] -> [..., 4]."""
    gamma_1, gamma_2, gamma_3 = gates.unbind(dim=-1)
    pi_1 = gamma_1 * gamma_2
    pi_2 = gamma_1 * (1 - gamma_2)
    pi_3 = (1 - gamma_1) * gamma_3
    pi_4 = (1 - gamma_1) * (1 - gamma_3)
    return torch.stack([pi_1, pi_2, pi_3, pi_4], dim=-1)


def label_smoothed_loss(log_probs, target, label_smoothing, ignore_index):
    """-sum_i sum_x q_i(x) log p_i(x) and its unsmoothed part, in nats; log_probs [N, V], target [N] -> two scalars.

    q_i is 1 - epsilon at the target and epsilon / (V-1) at every other token, as in fairseq (Szegedy et al. 2016 spread
    epsilon over all V tokens, the target among them). Where q_i(x) = 0 the term is 0, whatever p is. Targets equal to
    ignore_index count nothing.
    """
    log_probs = log_probs.double()
    vocab_size = log_probs.shape[1]
    smoothed, one_hot = torch.zeros_like(log_probs), torch.zeros_like(log_probs)
    for i, x in enumerate(target.tolist()):
        if x != ignore_index:
            smoothed[i] = label_smoothing / (vocab_size - 1)
            smoothed[i, x] = 1 - label_smoothing
            one_hot[i, x] = 1
    loss, nll = [-(q[q > 0] * log_probs[q > 0]).sum() for q in (smoothed, one_hot)]
    return loss, nll


def relative_attention(query, key, value, rel_key, rel_value, k, causal):
    """One head of self-attention with relative positions, Shaw et al. 2018 eq. 3 and 4.

    e_ij = q_i . (k_j + a^K_ij) / sqrt(Dh), z_i = sum_j softmax_j(e_ij) (v_j + a^V_ij), where a_ij is row
    clip(j-i, -k, k) + k of its table. Query i and key j stand at positions i and j; causal leaves out j > i.
    query [T, Dh], key and value [J, Dh], rel_key and rel_value [2k+1, Dh] -> [T, Dh].
    """
    query, key, value, rel_key, rel_value = [t.double() for t in (query, key, value, rel_key, rel_value)]
    outputs = []
    for i in range(len(query)):
        energies, values = [], []  # of the keys that query i sees
        for j in range(len(key)):
            if causal and j > i:
                continue
            row = max(-k, min(k, j - i)) + k
            energies.append((query[i] * (key[j] + rel_key[row])).sum() / query.shape[1] ** 0.5)
            values.append(value[j] + rel_value[row])
        weights = torch.softmax(torch.stack(energies), dim=0)
        outputs.append(sum(weights[j] * values[j] for j in range(len(values))))
    return torch.stack(outputs)


def _double(params):
    return {name: param.double() for name, param in params.items()}


def _logits(params, contexts):
    return contexts @ params["weight"].T + params["bias"]
