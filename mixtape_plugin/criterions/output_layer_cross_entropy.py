"""Label-smoothed cross entropy through an output layer's own loss."""

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Iterator, List, Tuple, Union

import torch
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from fairseq.dataclass import FairseqDataclass
from fairseq.models import BaseFairseqModel
from fairseq.tasks import FairseqTask
from fairseq.tasks.translation import TranslationTask
from omegaconf import II, DictConfig
from torch import Tensor

from mixtape_plugin.errors import UserError, check_values
from mixtape_plugin.output_layers import OutputLayer, find_output_layer


@dataclass
class OutputLayerCrossEntropyConfig(FairseqDataclass):
    label_smoothing: float = field(default=0.0, metadata={"help": "epsilon, the mass spread over the other tokens"})
    report_accuracy: bool = field(default=False, metadata={"help": "log how often the target is the top token"})
    ignore_prefix_size: int = field(default=0, metadata={"help": "leave out the first N targets of each sentence"})
    sentence_avg: bool = II("optimization.sentence_avg")


@contextmanager
def evaluating(layer: OutputLayer) -> Iterator[None]:
    """Without dropout and noise, which would draw from the training's random numbers."""
    training = layer.training
    layer.eval()
    try:
        yield
    finally:
        layer.train(training)


@register_criterion("output_layer_cross_entropy", dataclass=OutputLayerCrossEntropyConfig)
class OutputLayerCrossEntropy(FairseqCriterion):
    """Asks the model for features only and its output layer for the loss, which need not hold all scores at once.

    The same numbers and logs as fairseq's ``label_smoothed_cross_entropy`` (logs in bits, base 2), but with
    ``ignore_prefix_size``: fairseq leaves these targets out of the sum and counts them still, so that its perplexity is
    too low; here they are not counted.

    Raises:
        UserError: ε outside [0, 1), a prefix of fewer than 0 targets, or a model whose decoder has no output layer of
            this plugin.
    """

    #: What it is registered as.
    name = "output_layer_cross_entropy"
    #: Numbers that an option --report-… logs.
    reportable = ("accuracy",)

    def __init__(
        self,
        task: FairseqTask,
        sentence_avg: bool,
        label_smoothing: float = 0.0,
        report_accuracy: bool = False,
        ignore_prefix_size: int = 0,
    ):
        super().__init__(task)
        self.sentence_avg = sentence_avg
        self.label_smoothing = label_smoothing
        self.report_accuracy = report_accuracy
        self.ignore_prefix_size = ignore_prefix_size
        allowed = {
            "label_smoothing": (0 <= label_smoothing < 1, "from 0 to less than 1"),
            "ignore_prefix_size": (ignore_prefix_size >= 0, "0 or more"),
        }
        check_values(self, allowed)

    def output_layer_of(self, model: BaseFairseqModel) -> OutputLayer:
        """The output layer of a model's decoder; raises UserError where it is none of this plugin."""
        layer = find_output_layer(model)
        if layer is None:
            raise UserError(
                f"--criterion {self.name} needs a model of this plugin, such as mixtape_transformer, "
                f"not {type(model).__name__}: use label_smoothed_cross_entropy with it"
            )
        return layer

    def check_training(self, cfg: DictConfig, model: BaseFairseqModel) -> None:
        """Raises UserError for a model without an output layer of this plugin, where checkpoints are chosen by a number
        that is not reported, and where processes would not find the output layer's parameters."""
        self.output_layer_of(model)
        processes = cfg.distributed_training
        by_torch = processes.distributed_world_size > 1 and processes.ddp_backend in ("pytorch_ddp", "c10d")
        if by_torch and processes.find_unused_parameters:
            # torch looks for them in what the model gives, and features do not depend on the output layer
            raise UserError(
                f"--find-unused-parameters does not go with --criterion {self.name}, which asks the output "
                "layer for the loss: leave it out, or use --ddp-backend legacy_ddp, which needs no such flag"
            )
        metric = cfg.checkpoint.best_checkpoint_metric
        if metric == "bpc" and metric not in self.reportable:
            raise UserError(
                f"--best-checkpoint-metric bpc does not go with --criterion {self.name}, which reports none: "
                "use ppl, or awd_lstm_cross_entropy with --report-bpc"
            )
        if metric in self.reportable and not getattr(self, f"report_{metric}"):
            raise UserError(f"--best-checkpoint-metric {metric} needs --report-{metric}: add it")
        # fairseq finds out after the first epoch, and saves nothing; other tasks may report what they like
        reduce_metrics = type(self.task).reduce_metrics
        translates = reduce_metrics is TranslationTask.reduce_metrics
        if translates and metric == "bleu" and not self.task.cfg.eval_bleu:
            raise UserError("--best-checkpoint-metric bleu needs --eval-bleu: add it")
        known = ["loss", "nll_loss", "ppl", *self.reportable] + ["bleu"] * translates
        if metric not in known and (translates or reduce_metrics is FairseqTask.reduce_metrics):
            raise UserError(f"--best-checkpoint-metric {metric} is none of {', '.join(known)}")
        larger, maximize = metric in ("accuracy", "bleu"), cfg.checkpoint.maximize_best_checkpoint_metric
        if metric in known and larger != maximize:
            do = "needs --maximize-best-checkpoint-metric: add it"
            leave = "is better where it is smaller: leave --maximize-best-checkpoint-metric out"
            raise UserError(f"--best-checkpoint-metric {metric} {do if larger else leave}")

    def forward(self, model: BaseFairseqModel, sample: dict, reduce: bool = True) -> Tuple[Tensor, int, dict]:
        """The summed loss in nats, the sample size that divides its gradient, and what to log."""
        if not reduce:
            raise ValueError(f"{self.name} sums over tokens: for one loss a token use cross_entropy")
        layer = self.output_layer_of(model)
        features, extra = model(**sample["net_input"], features_only=True)
        target = model.get_targets(sample, None)
        if self.ignore_prefix_size:
            rank = target.ne(self.padding_idx).cumsum(1)  # of each target in its sentence, wherever padding is
            target = target.masked_fill(rank <= self.ignore_prefix_size, self.padding_idx)
        ntokens = target.ne(self.padding_idx).sum() if self.ignore_prefix_size else sample["ntokens"]
        logging_output = {}
        loss, nll = layer.loss(features, target, label_smoothing=self.label_smoothing, ignore_index=self.padding_idx)
        if self.report_accuracy:
            counted = target.ne(self.padding_idx)
            with torch.no_grad(), evaluating(layer):
                chunks = features[counted].split(layer.contexts_at_once)
                top = torch.cat([layer(chunk).argmax(-1) for chunk in chunks])
            logging_output["n_correct"] = top.eq(target[counted]).sum()
            logging_output["total"] = counted.sum()
        sample_size = target.size(0) if self.sentence_avg else ntokens
        if self.training:
            loss = loss + sample_size * self.penalty(features, extra)
        logging_output.update(
            loss=loss.data,
            nll_loss=nll.data,
            ntokens=ntokens,
            nsentences=target.size(0),
            sample_size=sample_size,
        )
        return loss, sample_size, logging_output

    def penalty(self, features: Tensor, extra: dict) -> Union[Tensor, float]:
        """What is added to the mean loss in training; for subclasses."""
        return 0.0

    @staticmethod
    def reduce_metrics(logging_outputs: List[dict]) -> None:
        """fairseq's label-smoothed logs: loss, nll_loss, ppl and, if asked for, accuracy."""
        LabelSmoothedCrossEntropyCriterion.reduce_metrics(logging_outputs)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        return True
