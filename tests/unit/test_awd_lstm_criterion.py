"""The criterion of the AWD-LSTM language model, its penalties and what it reports, against the float64 reference.

Shapes: B columns, T time.
"""

import argparse
import math
from types import SimpleNamespace

import pytest
import reference_lm
import torch
import torch.nn.functional as F
from fairseq.criterions import CRITERION_REGISTRY
from fairseq.logging import metrics
from test_awd_lstm import (
    B,
    T,
    build,
    build_task,
    close,
    expected_log_probs,
    parameters_of,
    random_tokens,
    sharpen,
)

from mixtape_plugin.criterions.awd_lstm_cross_entropy import AWDLSTMCrossEntropy
from mixtape_plugin.output_layers import OUTPUT_LAYERS


def build_criterion(**options):
    criterion = CRITERION_REGISTRY["awd_lstm_cross_entropy"]
    options = {"ar_alpha": 2.0, "tar_beta": 1.0, "report_bpc": False, "sentence_avg": False, **options}
    return criterion.build_criterion(argparse.Namespace(**options), build_task())


def sample_of(tokens, target, pad=1):
    net_input = {"src_tokens": tokens, "src_lengths": torch.full((len(tokens),), tokens.shape[1])}
    net_input.update(stream="train", first_segment=True)
    return {
        "id": torch.arange(len(tokens)),
        "nsentences": len(tokens),
        "ntokens": int(target.ne(pad).sum()),
        "net_input": net_input,
        "target": target,
        "lr_scale": 1.0,
        "segment": 0,
        "last_segment": False,
    }


def logged(criterion, *steps):
    """What fairseq shows after steps, each of one process's logging output or of a list of several processes'."""
    with metrics.aggregate(new_root=True) as meters:
        for step in steps:
            type(criterion).reduce_metrics(step if isinstance(step, list) else [step])
    return meters.get_smoothed_values()


@pytest.mark.parametrize("alpha, beta", [(2.0, 1.0), (0.0, 3.0), (5.0, 0.0)])
@pytest.mark.parametrize("time", [1, 2, T])
@pytest.mark.parametrize("name", OUTPUT_LAYERS)
def test_criterion_equals_reference(name, time, alpha, beta):
    """AR of the dropped output, TAR of the undropped one, each a mean as the NLL is; one step has no TAR."""
    model = sharpen(build(name, dropout=0.4, hidden=0.3, weight=0.5)).train()
    criterion = build_criterion(ar_alpha=alpha, tar_beta=beta).train()
    sample = sample_of(random_tokens(B, time), random_tokens(B, time))
    torch.manual_seed(7)
    loss, sample_size, logging_output = criterion(model, sample)
    torch.manual_seed(7)
    features, extra = model(**sample["net_input"], features_only=True)
    assert (features == 0).any() and (extra["last_hidden"] != 0).all()

    nll = F.nll_loss(expected_log_probs(model, features).flatten(0, 1), sample["target"].flatten(), reduction="sum")
    penalty = reference_lm.activation_regularization(features, alpha)
    penalty += reference_lm.temporal_activation_regularization(extra["last_hidden"], beta)
    count = B * time
    assert sample_size == count and logging_output["ntokens"] == count
    expected = nll + count * penalty
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)  # the penalties are taken in float32
    parameters = list(model.parameters())
    gradients = [torch.autograd.grad(x, parameters) for x in (loss, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)

    values = logged(criterion, logging_output)
    bits = nll.item() / count / math.log(2)
    assert values["ppl"] == pytest.approx(2**bits, abs=0.006)  # fairseq rounds it to two places
    assert values["loss"] == pytest.approx(loss.item() / count / math.log(2), abs=0.002)


def test_evaluation_has_no_penalties_and_counts_no_pads():
    model, criterion = sharpen(build("mixtape", dropout=0.4)).eval(), build_criterion(report_bpc=True).eval()
    target = random_tokens()
    target[1:, -1] = 1
    sample = sample_of(random_tokens(), target)
    loss, sample_size, logging_output = criterion(model, sample)
    features, _, _ = reference_lm.awd_lstm(*parameters_of(model), sample["net_input"]["src_tokens"])
    log_probs = expected_log_probs(model, features).flatten(0, 1)
    expected = F.nll_loss(log_probs, target.flatten(), reduction="sum", ignore_index=1)
    close(loss, expected)
    count = B * T - (B - 1)
    assert sample_size == count and logging_output["ntokens"] == count
    values = logged(criterion, logging_output)
    bits = expected.item() / count / math.log(2)
    assert values["ppl"] == pytest.approx(2**bits, abs=0.006)
    assert values["bpc"] == pytest.approx(bits, abs=0.002)


@pytest.mark.parametrize("of_two_processes", [False, True])
def test_bits_per_character_are_a_mean_over_tokens(of_two_processes):
    """Of segments of different lengths, one after the other or at once."""
    logs = [
        {"loss": nll, "nll_loss": nll, "ntokens": tokens, "sample_size": tokens, "bpc": True}
        for nll, tokens in ((torch.tensor(30.0), 10), (torch.tensor(8.0), 2))
    ]
    values = logged(build_criterion(report_bpc=True), *([logs] if of_two_processes else logs))
    assert values["bpc"] == pytest.approx(38 / 12 / math.log(2), abs=1e-4)


def test_bits_per_character_are_of_the_nll_alone():
    """In training, where the loss has penalties, and with label smoothing."""
    model = sharpen(build("softmax", dropout=0.4)).train()
    criterion = build_criterion(report_bpc=True, label_smoothing=0.1).train()
    sample = sample_of(random_tokens(), random_tokens())
    torch.manual_seed(7)
    _, _, logging_output = criterion(model, sample)
    torch.manual_seed(7)
    features, _ = model(**sample["net_input"], features_only=True)
    nll = F.nll_loss(expected_log_probs(model, features).flatten(0, 1), sample["target"].flatten())
    values = logged(criterion, logging_output)
    assert values["bpc"] == pytest.approx(nll.item() / math.log(2), abs=1e-4)
    assert values["loss"] > 1.02 * values["bpc"]


def test_penalties_of_half_precision_are_in_float32():
    """The squares of differences of 1e-4 are less than float16 holds."""
    hidden = (1e-4 * torch.arange(4.0).view(1, 4, 1)).half()
    penalty = AWDLSTMCrossEntropy.penalty(SimpleNamespace(ar_alpha=2.0, tar_beta=1.0), hidden, {"last_hidden": hidden})
    assert penalty.dtype == torch.float32 and penalty.item() == pytest.approx(2 * 3.5e-8 + 1e-8, rel=1e-2)


def test_penalties_do_not_depend_on_what_the_loss_is_divided_by():
    model, sample = sharpen(build("softmax")).train(), sample_of(random_tokens(), random_tokens())
    penalty = {}
    for sentence_avg, count in (False, B * T), (True, B):
        losses = []
        for weight in 0.0, 1.0:
            criterion = build_criterion(ar_alpha=2 * weight, tar_beta=weight, sentence_avg=sentence_avg).train()
            torch.manual_seed(7)
            loss, sample_size, _ = criterion(model, sample)
            losses.append(loss.item())
        assert sample_size == count
        penalty[sentence_avg] = (losses[1] - losses[0]) / count
    assert penalty[True] == pytest.approx(penalty[False], rel=1e-6)
