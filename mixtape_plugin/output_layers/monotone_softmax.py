"""A monotone map of the scores before the softmax: SigSoftmax, GSS and LMS-PLIF (Parthiban et al. 2021)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixtape_plugin.kernels.common import Smoothing
from mixtape_plugin.kernels.curves import Curve, GeneralizedSigSoftmax, PiecewiseLinear
from mixtape_plugin.kernels.precision import at_least_float32
from mixtape_plugin.kernels.softmax import softmax_loss
from mixtape_plugin.output_layers.base import OutputLayer, rows


class MonotoneSoftmax(OutputLayer):
    """p(x|c) = softmax_x(f(z_x)), z_x = α g·w_x + b_x, f monotone and the same for all tokens; E = D as for softmax.

    A subclass has :meth:`curve`. :meth:`forward` returns f(z) in float32 or better, −∞ for tokens that cannot be
    predicted: f sees finite scores only.
    """

    def curve(self) -> Curve:
        """The map f, made anew for each use."""
        raise NotImplementedError

    @property
    def scores_per_token(self) -> int:
        return 4 * self.vocab_size

    @property
    def multiply_adds(self) -> int:
        return self.vocab_size * self.embed_dim

    def forward(self, features: Tensor) -> Tensor:
        scores = F.linear(self.scaled(features), self.weight, self.bias)
        values = self.curve().value(scores.to(at_least_float32(scores.dtype)))
        return values if self.vocabulary_mask is None else values.masked_fill(self.vocabulary_mask, -torch.inf)

    def fused_loss(
        self, features: Tensor, target: Tensor, index: Tensor | None, smoothing: Smoothing
    ) -> tuple[Tensor, Tensor]:
        context = self.scaled(rows(features, features.shape[:-1], index))
        return softmax_loss(context, self.weight, self.bias, target, smoothing, self.vocabulary_mask, self.curve())


class GSS(MonotoneSoftmax):
    """Generalized SigSoftmax: f(z) = z − (k−1)·softplus(c−z) (Parthiban et al. 2021, eq. 3 and 5), without parameters:
    slope k far below c, 1 far above."""

    label = "GSS"
    fixed_options = ("gss_c", "gss_k")

    def curve(self) -> Curve:
        return GeneralizedSigSoftmax(self.config.gss_c, self.config.gss_k)


class SigSoftmax(MonotoneSoftmax):
    """p(x|c) ∝ exp(z_x)·σ(z_x) (Kanai et al. 2018): GSS with c = 0 and k = 2."""

    label = "SigSoftmax"

    def curve(self) -> Curve:
        return GeneralizedSigSoftmax(c=0.0, k=2.0)


class PLIF(MonotoneSoftmax):
    """LMS-PLIF (Ganea et al. 2019): f is continuous and linear on each of K pieces of [−T, T], K = ``plif_pieces``,
    T = ``plif_range``, and goes on as on the end pieces beyond; slopes s = softplus(``slopes_raw``) > 0 are learned.

    ``slopes_raw`` [K] starts at Normal(ln(e−1), ``plif_init_std``), where s = 1 without deviation, and asks fairseq's
    optimizers for a learning rate ``plif_lr_scale`` times that of the others. Its sums, and C of
    :class:`~mixtape_plugin.kernels.curves.PiecewiseLinear`, are in float32 or better whatever its type.

    With ``freeze_plif`` slopes stay as they were drawn. With many narrow pieces f is then a line to within a few
    hundredths, a temperature, while its derivative s_i is a random factor of each gradient.
    """

    label = "LMS-PLIF"
    variants = {"frozen": {"freeze_plif": True}}
    fixed_options = ("plif_range",)

    def build_parameters(self) -> None:
        config = self.config
        self.slopes_raw = nn.Parameter(torch.empty(config.plif_pieces), requires_grad=not config.freeze_plif)
        nn.init.normal_(self.slopes_raw, math.log(math.e - 1), config.plif_init_std)

    def set_optim_overrides(self) -> None:
        super().set_optim_overrides()
        if not self.config.freeze_plif:
            self.slopes_raw.optim_overrides = {"optimizer": {"lr_scale": self.config.plif_lr_scale}}

    @property
    def scores_per_token(self) -> int:
        return 6 * self.vocab_size

    def curve(self) -> Curve:
        raw = self.slopes_raw
        return PiecewiseLinear(F.softplus(raw.to(at_least_float32(raw.dtype))), self.config.plif_range)
