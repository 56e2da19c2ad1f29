"""What a mixture mixes: how many of its components count, and what is left of their context vectors.

Shapes: N contexts, K components, E embedding.
"""

from __future__ import annotations

from typing import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from mixtape_plugin.analysis.frequency import members
from mixtape_plugin.analysis.trained_model import Text, TrainedModel
from mixtape_plugin.errors import UserError
from mixtape_plugin.output_layers.mixture import MixtureLayer
from mixtape_plugin.tables import table

MEASURES = {
    "components": "exp(entropy) of the target's priors",
    "cosine": "mean cosine of two components' contexts",
    "length": "|Σ π_k h_k| / Σ π_k |h_k|",
    "saturated": "share of elements with |tanh| > .9",
}
COLUMNS = ("rank", "tokens", "training", "K", *MEASURES)
SATURATED = 0.9


def measure(priors: Tensor, contexts: Tensor, context_scale: float = 1.0) -> dict[str, Tensor]:
    """Of each context, [N]:

    - ``components``: exp(−Σ_k π_k log π_k), in how many components the weight lies: 1 to K;
    - ``cosine``: the mean cosine of two different h_k, 1 for K = 1: components that agree are one;
    - ``length``: |Σ_k π_k h_k| / Σ_k π_k |h_k|, what averaging leaves of the vectors' lengths: 1 where all point one
      way. MoS averages distributions, not contexts: there it only says how these lie;
    - ``saturated``: the share of the elements of all h_k that are beyond .9 of a tanh's bound.

    Args:
        priors: π_k, [N, K]
        contexts: h_k, [N, K, E]
        context_scale: α
    """
    num_components = priors.size(-1)
    directions = F.normalize(contexts, dim=-1)
    # Σ_{j≠k} d_j·d_k = |Σ_k d_k|² − K for unit vectors d_k.
    pairs = num_components * (num_components - 1)
    together = directions.sum(-2).square().sum(-1) - num_components
    mixed = (priors.unsqueeze(-1) * contexts).sum(-2).norm(dim=-1)
    return {
        "components": torch.special.entr(priors).sum(-1).exp(),
        "cosine": together / pairs if pairs else torch.ones_like(together),
        "length": mixed / (priors * contexts.norm(dim=-1)).sum(-1),
        "saturated": (contexts.abs() > SATURATED * abs(context_scale)).float().mean((-2, -1)),
    }


def check_mixes(trained: TrainedModel) -> None:
    """Raises UserError where the model's output layer has no components."""
    if not isinstance(trained.layer, MixtureLayer):
        raise UserError(f"{trained.folder} has --output-layer {trained.layer.config.output_layer}, which mixes nothing")


@torch.no_grad()
def walk(trained: TrainedModel, split: str, progress: Callable[[int], object]) -> dict[str, Tensor]:
    """:func:`measure` of every context of a text, in its order, with the priors of its target.

    ``progress`` is called with the number of contexts of each step.

    Raises:
        UserError: as :func:`check_mixes`.
    """
    check_mixes(trained)
    layer, parts = trained.layer, []
    scale = 1.0 if layer.context_scale is None else layer.context_scale.item()
    for features, targets in trained.pieces(split):
        found = measure(layer.priors(features, targets).float(), layer.context_vectors(features).float(), scale)
        parts.append([part.cpu() for part in found.values()])
        progress(len(targets))
    return dict(zip(MEASURES, map(torch.cat, zip(*parts))))


def by_frequency(found: dict, components: dict, text: Text) -> list[dict]:
    """A row for each class of targets (:func:`~mixtape_plugin.analysis.frequency.classes`) and model: means of the
    measures; the last are of all.

    Args:
        found: model -> what :func:`walk` returns.
        components: model -> K.
    """
    return [
        {
            "rank": name,
            "tokens": int(here.sum()),
            "training": model,
            "K": components[model],
            **{column: values[here].double().mean().item() for column, values in measures.items()},
        }
        for name, here in members(text).items()
        for model, measures in found.items()
    ]


def markdown(rows: list[dict]) -> str:
    """A table: a line for each class and model, with the meaning of its columns below."""
    lines = (
        [row["rank"], f"{row['tokens']:,}", row["training"], str(row["K"])]
        + [f"{row['components']:.2f}", f"{row['cosine']:+.2f}", f"{row['length']:.2f}", f"{row['saturated']:.2f}"]
        for row in rows
    )
    return table(list(COLUMNS), lines) + "\n" + "; ".join(f"{name}: {text}" for name, text in MEASURES.items()) + "\n"
