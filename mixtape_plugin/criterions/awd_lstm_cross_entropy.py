"""Cross entropy with the activation penalties of AWD-LSTM."""

import math
from dataclasses import dataclass, field
from typing import List, Tuple

from fairseq.criterions import register_criterion
from fairseq.logging import metrics
from fairseq.models import BaseFairseqModel
from fairseq.tasks import FairseqTask
from torch import Tensor

from mixtape_plugin.criterions.output_layer_cross_entropy import (
    OutputLayerCrossEntropy,
    OutputLayerCrossEntropyConfig,
)
from mixtape_plugin.errors import UserError, check_values
from mixtape_plugin.kernels.precision import at_least_float32


@dataclass
class AWDLSTMCrossEntropyConfig(OutputLayerCrossEntropyConfig):
    ar_alpha: float = field(default=2.0, metadata={"help": "alpha, weight of the activation regularization"})
    tar_beta: float = field(default=1.0, metadata={"help": "beta, weight of the temporal activation regularization"})
    report_bpc: bool = field(default=False, metadata={"help": "log bits per character, for a text of characters"})


@register_criterion("awd_lstm_cross_entropy", dataclass=AWDLSTMCrossEntropyConfig)
class AWDLSTMCrossEntropy(OutputLayerCrossEntropy):
    """In training, mean NLL + α·mean(m²) + β·mean((h_{t+1} − h_t)²) (Merity et al. 2018, section 4.6), m the last
    layer's output after dropout and h before it, over all steps of a batch. In evaluation without the penalties;
    perplexity is of the NLL always, with label smoothing too.

    Raises:
        UserError: α or β below 0; a model that does not tell its last layer's output; or what
            :class:`OutputLayerCrossEntropy` raises.
    """

    name = "awd_lstm_cross_entropy"
    reportable = ("accuracy", "bpc")

    def __init__(
        self,
        task: FairseqTask,
        sentence_avg: bool,
        label_smoothing: float = 0.0,
        report_accuracy: bool = False,
        ar_alpha: float = 2.0,
        tar_beta: float = 1.0,
        report_bpc: bool = False,
        ignore_prefix_size: int = 0,
    ):
        super().__init__(task, sentence_avg, label_smoothing, report_accuracy, ignore_prefix_size)
        self.ar_alpha = ar_alpha
        self.tar_beta = tar_beta
        check_values(self, {name: (getattr(self, name) >= 0, "0 or more") for name in ("ar_alpha", "tar_beta")})
        self.report_bpc = report_bpc

    def penalty(self, features: Tensor, extra: dict) -> Tensor:
        """α·mean(m²) + β·mean((h_{t+1} − h_t)²) for m, h [B, T, D]; a segment of one step has no second term."""
        if "last_hidden" not in extra:
            raise UserError(
                "--criterion awd_lstm_cross_entropy needs the last layer's output, as awd_lstm_lm gives it: "
                "use output_layer_cross_entropy with other models"
            )
        dtype = at_least_float32(features.dtype)
        penalty = self.ar_alpha * features.to(dtype).pow(2).mean()
        hidden = extra["last_hidden"].to(dtype)
        if hidden.size(1) > 1:
            penalty = penalty + self.tar_beta * (hidden[:, 1:] - hidden[:, :-1]).pow(2).mean()
        return penalty

    def forward(self, model: BaseFairseqModel, sample: dict, reduce: bool = True) -> Tuple[Tensor, int, dict]:
        """The summed loss in nats, the number of targets, and what to log."""
        loss, sample_size, logging_output = super().forward(model, sample, reduce)
        logging_output["bpc"] = self.report_bpc
        return loss, sample_size, logging_output

    @staticmethod
    def reduce_metrics(logging_outputs: List[dict]) -> None:
        """fairseq's label-smoothed logs (base 2), and ``bpc`` if asked for."""
        OutputLayerCrossEntropy.reduce_metrics(logging_outputs)
        if any(log.get("bpc") for log in logging_outputs):
            nll = sum(log["nll_loss"] for log in logging_outputs)
            ntokens = sum(log["ntokens"] for log in logging_outputs)
            metrics.log_scalar("bpc", nll / ntokens / math.log(2), ntokens, round=4)
