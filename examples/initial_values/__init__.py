"""Mixtures from initial values that their papers do not give, or with a scale that is not learned: layers for
``--user-dir examples/initial_values``.

One ablation each; docs/results_*.md have what they did, but for MoC from shared contexts and with a fixed scale, which
are not run.
Also how layers of your own are trained without a change to the plugin: a package that calls
``mixtape_plugin.register()`` and adds rows to ``OUTPUT_LAYERS``.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[2]))  # where the plugin is not installed

import mixtape_plugin
from mixtape_plugin.errors import UserError
from mixtape_plugin.output_layers import OUTPUT_LAYERS
from mixtape_plugin.output_layers.mixtape import Mixtape
from mixtape_plugin.output_layers.mixture import MixtureLayer
from mixtape_plugin.output_layers.mixture_of_contexts import MixtureOfContexts

mixtape_plugin.register()


class XavierContexts(Mixtape):
    """Each H_k alone as Glorot and Bengio (2010) have it for tanh: U(±(5/3)·√(6/(D+E))), not U(±1/√D)."""

    def build_parameters(self) -> None:
        super().build_parameters()
        for component in self.context.weight.unflatten(0, (self.num_components, -1)):
            nn.init.xavier_uniform_(component, nn.init.calculate_gain("tanh"))


class IdentityContexts(MixtureLayer):
    """H_k = 1 + noise of standard deviation .1/√D, where E = D: each h_k begins near tanh(g). For any mixture."""

    def build_parameters(self) -> None:
        super().build_parameters()
        if self.embed_dim != self.feature_dim:
            raise UserError(
                f"--output-layer {self.config.output_layer} needs an embedding as wide as the features, "
                f"{self.feature_dim}; it is {self.embed_dim}"
            )
        for component in self.context.weight.unflatten(0, (self.num_components, -1)):
            nn.init.eye_(component)
            component.data.add_(component.new_empty(component.shape).normal_(std=0.1 * self.feature_dim**-0.5))


class MixtapeIdentity(IdentityContexts, Mixtape):
    """Mixtape with such contexts."""


class MoCIdentity(IdentityContexts, MixtureOfContexts):
    """MoC with such contexts."""


class SharedContexts(MixtureLayer):
    """H_k = H + noise of standard deviation .1/√D, and one bias: each component begins near a MoC-1, for any widths.
    Components drawn apart point apart, so that their average is short, and has to be made up for in each."""

    def build_parameters(self) -> None:
        super().build_parameters()
        components = self.context.weight.data.unflatten(0, (self.num_components, -1))
        components[1:] = components[0]
        components.add_(torch.empty_like(components).normal_(std=0.1 * self.feature_dim**-0.5))
        biases = self.context.bias.data.unflatten(0, (self.num_components, -1))
        biases[1:] = biases[0]


class MixtapeShared(SharedContexts, Mixtape):
    """Mixtape with such contexts."""


class MoCShared(SharedContexts, MixtureOfContexts):
    """MoC with such contexts."""


class FixedScale(MixtureLayer):
    """α stays at --context-scale, instead of being learned from it. For any mixture."""

    def build_parameters(self) -> None:
        super().build_parameters()
        if self.context_scale is None:
            raise UserError(f"--output-layer {self.config.output_layer} needs a --context-scale; it has none")
        self.context_scale.requires_grad_(False)


class MixtapeFixedScale(FixedScale, Mixtape):
    """Mixtape with such a scale."""


class MoCFixedScale(FixedScale, MixtureOfContexts):
    """MoC with such a scale."""


class SmallGates(Mixtape):
    """v_x with a tenth of its standard deviation: the tokens' gates begin nearly alike."""

    factor = 0.1

    def build_parameters(self) -> None:
        super().build_parameters()
        self.gate_embedding.data.mul_(self.factor)


class LargeTokenVectors(SmallGates):
    """v_x with ten times its standard deviation: the tokens' gates begin apart."""

    factor = 10.0


class LargeGates(Mixtape):
    """The constant of the weight normalization is 4: rows of U_k have norm 4, not 1. For --gate-weight-norm."""

    constant = 4.0

    def gate_contexts(self, features: Tensor) -> Tensor:
        return super().gate_contexts(self.constant * features)


for name, layer in {
    "mixtape-xavier": XavierContexts,
    "mixtape-identity": MixtapeIdentity,
    "moc-identity": MoCIdentity,
    "mixtape-shared": MixtapeShared,
    "moc-shared": MoCShared,
    "mixtape-fixed-scale": MixtapeFixedScale,
    "moc-fixed-scale": MoCFixedScale,
    "mixtape-small-gates": SmallGates,
    "mixtape-large-token-vectors": LargeTokenVectors,
    "mixtape-large-gates": LargeGates,
}.items():
    layer.label = name.capitalize()
    OUTPUT_LAYERS[name] = layer
