"""The softmax bottleneck (Yang et al. 2018) without a language: one random distribution for each of N free contexts.

Shapes: N contexts, D features, E embedding, K components, V tokens.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Callable

import numpy as np
import torch
from torch import Tensor, nn

from mixtape_plugin.analysis.rank import press_rank, singular_values
from mixtape_plugin.output_layers import OUTPUT_LAYERS, OutputLayerConfig, build_output_layer
from mixtape_plugin.output_layers.monotone_softmax import MonotoneSoftmax

NUM_COMPONENTS = 4
LR = 0.03
MAP_SCORES = torch.linspace(-10, 10, 401, dtype=torch.float64)
# Name in the table -> options of its output layer: each with gates of its own for every token, where it has gates.
LAYERS = {
    layer_class.label: {"output_layer": name, "frequent_ratio": 1.0} for name, layer_class in OUTPUT_LAYERS.items()
}
LAYERS["Mixtape r=.5"] = {"output_layer": "mixtape", "frequent_ratio": 0.5}


def random_conditional(
    num_contexts: int, vocab_size: int, concentration: float, rng: np.random.Generator
) -> np.ndarray:
    """log P*(x|c) of N independent draws from a symmetric Dirichlet, [N, V] in nats, float64 and finite.

    A Dirichlet draw is a vector of Gamma(a) variables over its sum. For small a they fall below the smallest float64,
    hence in logarithms: Gamma(a) = Gamma(a+1)·U^(1/a), U uniform on (0, 1].
    """
    shape = (num_contexts, vocab_size)
    log_gamma = np.log(rng.standard_gamma(concentration + 1, shape)) + np.log1p(-rng.random(shape)) / concentration
    return log_gamma - np.logaddexp.reduce(log_gamma, axis=1, keepdims=True)


def kl_divergence(true_log_probs: Tensor, log_probs: Tensor) -> float:
    """KL(P*‖P) = Σ_x P*(x|c)·(log P*(x|c) − log P(x|c)) in nats, mean over the contexts, in float64; 0·log 0 = 0.

    Args:
        true_log_probs: log P*, [N, V]; −inf is allowed.
        log_probs: log P, [N, V].
    """
    true_log_probs, log_probs = true_log_probs.double(), log_probs.double()
    true_probs = true_log_probs.exp()
    terms = true_probs * (true_log_probs - log_probs)
    return terms.where(true_probs > 0, terms.new_zeros(())).sum(-1).mean().item()


class FreeContexts(nn.Module):
    """An output layer over one free feature vector for each context: what no network could do better.

    All layers get features of the same width D. Those without a projection, whose embedding is as wide as what they
    see, see them through a linear map to E.
    """

    def __init__(self, config: OutputLayerConfig, num_contexts: int, feature_dim: int, vocab_size: int):
        super().__init__()
        embed_dim = config.output_embed_dim
        self.features = nn.Parameter(torch.randn(num_contexts, feature_dim))
        has_projection = OUTPUT_LAYERS[config.output_layer].has_projection
        self.project = nn.Identity() if has_projection else nn.Linear(feature_dim, embed_dim, bias=False)
        self.layer = build_output_layer(config, feature_dim if has_projection else embed_dim, vocab_size)

    def forward(self) -> Tensor:
        """log P, [N, V] in nats."""
        return self.layer.log_probs(self.project(self.features))

    def num_layer_parameters(self) -> int:
        """All parameters but the features."""
        return sum(p.numel() for p in self.parameters()) - self.features.numel()


@dataclass
class Fit:
    """What one output layer reached: KL in nats, top-token accuracy in [0, 1], σ descending, KL before each step, and
    its map f at ``MAP_SCORES`` where it has one."""

    kl: float
    rank: int
    accuracy: float
    parameters: int
    seconds: float
    sigma: Tensor
    curve: list
    map_: Tensor | None = None


def fit(
    true_log_probs: Tensor,
    layer: dict,
    embed_dim: int,
    steps: int,
    seed: int,
    progress: Callable[[], object] | None = None,
) -> Fit:
    """Minimises KL(P*‖P) over the layer's parameters and the features, by Adam on all contexts at once.

    K = 4, D = K·E, d2 = E, no dropout, no gate noise; one-cycle learning rate. The gradient and the curve are in
    float32, what is reported at the end in float64.

    Args:
        true_log_probs: log P*, [N, V] in float64.
        layer: options of the output layer, a value of ``LAYERS``.
        progress: called after each step.

    Returns:
        :class:`Fit`
    """
    torch.manual_seed(seed)
    config = OutputLayerConfig(
        num_components=NUM_COMPONENTS, output_embed_dim=embed_dim, gate_dim=embed_dim, gate_noise=0.0, **layer
    )
    num_contexts, vocab_size = true_log_probs.shape
    model = FreeContexts(config, num_contexts, NUM_COMPONENTS * embed_dim, vocab_size)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=steps)
    true_probs = true_log_probs.exp()
    entropy = torch.special.entr(true_probs).sum(-1).mean().item()
    true_probs = true_probs.float()

    start, curve = time.perf_counter(), []
    for _ in range(steps):
        cross_entropy = -(true_probs * model()).sum(-1).mean()
        optimizer.zero_grad()
        cross_entropy.backward()
        optimizer.step()
        scheduler.step()
        curve.append(cross_entropy.item() - entropy)
        if progress:
            progress()
    seconds = time.perf_counter() - start

    with torch.no_grad():
        log_probs = model().double()
        sigma = singular_values(log_probs)
        map_ = model.layer.curve().value(MAP_SCORES) if isinstance(model.layer, MonotoneSoftmax) else None
    return Fit(
        kl=kl_divergence(true_log_probs, log_probs),
        rank=press_rank(sigma, *log_probs.shape),
        accuracy=(log_probs.argmax(-1) == true_log_probs.argmax(-1)).double().mean().item(),
        parameters=model.num_layer_parameters(),
        seconds=seconds,
        sigma=sigma,
        curve=curve,
        map_=map_,
    )
