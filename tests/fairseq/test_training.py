"""Training through fairseq-train: whatever the criterion, after a kill, in two processes, in half precision."""

import contextlib
import math
import signal
import socket
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    LAYERS,
    SENTENCES,
    build_small_model,
    console_script,
    generate_args,
    hypotheses,
    load_parameters,
    make_dictionary,
    parse_log,
    right_padded,
    run,
    start,
    train_args,
)
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from fairseq.models import BaseFairseqModel
from fairseq.tasks import FairseqTask
from fairseq.tasks.translation import TranslationTask
from fairseq_cli.train import should_stop_early
from omegaconf import OmegaConf

from mixtape_plugin.criterions.awd_lstm_cross_entropy import AWDLSTMCrossEntropy
from mixtape_plugin.criterions.output_layer_cross_entropy import OutputLayerCrossEntropy
from mixtape_plugin.errors import UserError
from mixtape_plugin.output_layers import base

NO_NOISE = "--dropout 0 --gate-noise 0".split()


def assert_same_parameters(path, other, **tolerance):
    parameters, others = load_parameters(path), load_parameters(other)
    assert parameters.keys() == others.keys()
    for name, value in parameters.items():
        torch.testing.assert_close(value, others[name], msg=lambda text, name=name: f"{name}: {text}", **tolerance)


# ------------------------------------------------------------------------------------------------ criterions


def make_sample(dictionary):
    sources = torch.tensor([[7, 12, 30, 9, 2], [4, 11, 25, 2, 1]]).flip(0)
    targets = [[10, 4, 4, 28, 31, 2], [31, 9, 2]]
    return {
        "net_input": {
            "src_tokens": sources,
            "src_lengths": torch.tensor([5, 5]),
            "prev_output_tokens": right_padded([[2] + target[:-1] for target in targets], dictionary.pad()),
        },
        "target": right_padded(targets, dictionary.pad()),
        "ntokens": 9,
    }


@pytest.mark.parametrize("sentence_avg", [False, True])
@pytest.mark.parametrize("output_layer", LAYERS)
def test_criterion_equals_fairseqs_own(output_layer, sentence_avg):
    """Loss, gradient and logs of the features-only path and of the path through all scores.

    But for the number of tokens with a prefix left out, which fairseq's counts, two sentences' first ones here.
    """
    dictionary = make_dictionary()
    model = build_small_model(dictionary=dictionary, output_layer=output_layer)
    task = SimpleNamespace(target_dictionary=dictionary)

    def loss_gradients_logs(criterion):
        model.zero_grad()
        loss, sample_size, logged = criterion.eval()(model, make_sample(dictionary))
        loss.backward()
        logged = {name: torch.as_tensor(value).double() for name, value in logged.items()}
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())], sample_size, logged

    for ours, fairseqs in (
        ((sentence_avg, 0.1, True), LabelSmoothedCrossEntropyCriterion(task, sentence_avg, 0.1, report_accuracy=True)),
        ((sentence_avg, 0.1, False), LabelSmoothedCrossEntropyCriterion(task, sentence_avg, 0.1)),
        ((sentence_avg, 0.1, True, 1), LabelSmoothedCrossEntropyCriterion(task, sentence_avg, 0.1, 1, True)),
        ((sentence_avg,), CrossEntropyCriterion(task, sentence_avg)),
    ):
        numbers, sample_size, logged = loss_gradients_logs(OutputLayerCrossEntropy(task, *ours))
        expected, expected_size, expected_logs = loss_gradients_logs(fairseqs)
        ntokens = 7 if ours[3:] == (1,) else 9
        assert logged.pop("ntokens") == ntokens and expected_logs.pop("ntokens") == 9
        assert sample_size == logged.pop("sample_size") == (2 if sentence_avg else ntokens)
        assert expected_size == expected_logs.pop("sample_size") == (2 if sentence_avg else 9)
        for number, other in zip(numbers, expected):  # fairseq's log-softmax is one in float32
            torch.testing.assert_close(number.double(), other.double(), rtol=1e-5, atol=1e-5)
        if isinstance(fairseqs, CrossEntropyCriterion):
            expected_logs["nll_loss"] = expected_logs["loss"]
        assert logged.keys() == expected_logs.keys()
        for name, value in logged.items():
            torch.testing.assert_close(value, expected_logs[name], rtol=1e-5, atol=0)


@pytest.mark.parametrize("prefix, ntokens", [(0, 9), (1, 7), (3, 3), (5, 1)])
def test_targets_of_an_ignored_prefix_are_not_counted(prefix, ntokens):
    """A uniform distribution has the perplexity of the vocabulary, whatever is left out."""
    dictionary = make_dictionary()
    model = build_small_model(dictionary=dictionary, output_layer="softmax")
    torch.nn.init.zeros_(model.decoder.output_projection.weight)
    criterion = OutputLayerCrossEntropy(SimpleNamespace(target_dictionary=dictionary), False, ignore_prefix_size=prefix)
    sample = make_sample(dictionary)
    left = {
        **sample,
        "target": torch.stack([line.roll((line == dictionary.pad()).sum().item()) for line in sample["target"]]),
    }
    assert not torch.equal(left["target"], sample["target"])
    for padded in sample, left:  # as of --left-pad-target
        _, sample_size, log = criterion(model, padded)
        assert sample_size == log["ntokens"] == ntokens
        assert log["nll_loss"] / log["ntokens"] == pytest.approx(math.log(len(dictionary)), rel=1e-5)


class TaskOfItsOwn(FairseqTask):
    target_dictionary = make_dictionary()

    def reduce_metrics(self, logging_outputs, criterion):
        """May report anything."""


class PlainTask(TaskOfItsOwn):
    reduce_metrics = FairseqTask.reduce_metrics


def training(metric="loss", maximize=False, **processes):
    several = {"find_unused_parameters": True, "distributed_world_size": 1, "ddp_backend": "legacy_ddp", **processes}
    criterion = {"_name": "output_layer_cross_entropy"}
    checkpoint = {"best_checkpoint_metric": metric, "maximize_best_checkpoint_metric": maximize}
    return OmegaConf.create({"distributed_training": several, "checkpoint": checkpoint, "criterion": criterion})


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("task, refused", [(TaskOfItsOwn, False), (PlainTask, True)])
def test_a_task_may_report_a_number_of_its_own(task, refused, maximize):
    criterion, model = OutputLayerCrossEntropy(task(None), False), build_small_model(dictionary=task.target_dictionary)
    message = "^--best-checkpoint-metric fluency is none of loss, nll_loss, ppl, accuracy$"
    with pytest.raises(UserError, match=message) if refused else contextlib.nullcontext():
        criterion.check_training(training(metric="fluency", maximize=maximize), model)


@pytest.mark.parametrize(
    "metric, maximize, sentence",
    [
        ("accuracy", False, "--best-checkpoint-metric accuracy needs --maximize-best-checkpoint-metric: add it"),
        ("ppl", True, "--best-checkpoint-metric ppl is better where it is smaller: leave --maximize-best-checkpoint-"),
        ("accuracy", True, None),
        ("ppl", False, None),
    ],
)
def test_the_best_checkpoint_is_not_the_worst(metric, maximize, sentence):
    criterion = OutputLayerCrossEntropy(PlainTask(None), False, report_accuracy=True)
    model = build_small_model(dictionary=PlainTask.target_dictionary)
    with pytest.raises(UserError, match=f"^{sentence}") if sentence else contextlib.nullcontext():
        criterion.check_training(training(metric=metric, maximize=maximize), model)


@pytest.mark.parametrize(
    "eval_bleu, maximize, sentence",
    [
        (True, True, None),
        (True, False, "--best-checkpoint-metric bleu needs --maximize-best-checkpoint-metric: add it"),
        (False, True, "--best-checkpoint-metric bleu needs --eval-bleu: add it"),
    ],
)
def test_the_best_translations_are_those_of_the_highest_bleu(eval_bleu, maximize, sentence):
    dictionary = make_dictionary()
    task = TranslationTask(OmegaConf.create({"eval_bleu": eval_bleu}), dictionary, dictionary)
    criterion = OutputLayerCrossEntropy(task, False)
    with pytest.raises(UserError, match=f"^{sentence}") if sentence else contextlib.nullcontext():
        criterion.check_training(training(metric="bleu", maximize=maximize), build_small_model(dictionary=dictionary))


@pytest.mark.parametrize(
    "world_size, backend, refused",
    [(2, "pytorch_ddp", True), (2, "c10d", True), (2, "legacy_ddp", False), (1, "c10d", False)],
)
def test_unused_parameters_are_not_looked_for_by_torch(world_size, backend, refused):
    criterion = OutputLayerCrossEntropy(PlainTask(None), False)
    cfg = training(distributed_world_size=world_size, ddp_backend=backend)
    message = "--find-unused-parameters does not go with --criterion output_layer_cross_entropy"
    with pytest.raises(UserError, match=message) if refused else contextlib.nullcontext():
        criterion.check_training(cfg, build_small_model(dictionary=PlainTask.target_dictionary))


@pytest.mark.parametrize("output_layer", LAYERS)
def test_reporting_accuracy_draws_nothing(output_layer, monkeypatch):
    """The losses after it are those of a training without it, and it counts what the layer finds without dropout."""
    dictionary = make_dictionary()
    dropouts = dict(gate_noise=0.5, gate_dropout=0.5, context_dropout=0.5)
    model = build_small_model(dictionary=dictionary, output_layer=output_layer, **dropouts)
    layer = model.decoder.output_projection.train()
    monkeypatch.setattr(base, "MAX_SCORES", 4 * layer.scores_per_token)
    chunks = []
    layer.register_forward_hook(lambda layer, _, output: None if layer.training else chunks.append(len(output)))
    sample, losses = make_sample(dictionary), []
    for report in False, True:
        criterion = OutputLayerCrossEntropy(SimpleNamespace(target_dictionary=dictionary), False, 0.1, report)
        torch.manual_seed(1)
        logs = [criterion(model, sample)[2] for _ in range(2)]
        losses.append([log["loss"] for log in logs])
    assert losses[0] == losses[1]
    assert chunks == [4, 4, 1] * 2, "the 9 targets alone, no more scores at once than allowed"
    assert model.decoder.output_projection.training
    scores, _ = model.eval()(**sample["net_input"])
    correct = (scores.argmax(-1) == sample["target"]) & (sample["target"] != dictionary.pad())
    assert logs[1]["n_correct"] == correct.sum()


def test_penalties_of_a_transformer_are_refused():
    dictionary = make_dictionary()
    criterion = AWDLSTMCrossEntropy(SimpleNamespace(target_dictionary=dictionary), False)
    with pytest.raises(UserError, match="awd_lstm_cross_entropy needs the last layer's output, .* with other models"):
        criterion(build_small_model(dictionary=dictionary), make_sample(dictionary))


@pytest.mark.slow
def test_training_does_not_depend_on_the_path(data, tmp_path):
    """fairseq-train with our criterion and with fairseq's own: the same losses and parameters."""
    more = [*NO_NOISE, *"--optimizer sgd --lr 0.5 --max-update 3 --output-layer mixtape".split()]
    for smoothing, fairseqs in (0.1, "label_smoothed_cross_entropy"), (0, "cross_entropy"):
        logs = []
        for criterion in "output_layer_cross_entropy", fairseqs:
            args = train_args(data, tmp_path / criterion / str(smoothing), *more, "--criterion", criterion)
            if smoothing:
                args += ["--label-smoothing", smoothing]
            lines = run("train", *args).log["train_inner"]
            logs.append([float(line["loss"]) for line in lines])
        assert logs[0] == logs[1] and len(logs[0]) == 3
        assert logs[0][2] < logs[0][0] - 0.1
        paths = [tmp_path / name / str(smoothing) for name in ("output_layer_cross_entropy", fairseqs)]
        assert_same_parameters(*(path / "checkpoint_last.pt" for path in paths), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_criterion_of_a_model_without_an_output_layer(data, tmp_path):
    small = "--encoder-layers 1 --decoder-layers 1 --encoder-embed-dim 8 --decoder-embed-dim 8"
    training = "--arch transformer --criterion output_layer_cross_entropy --optimizer sgd --lr 1 --max-tokens 512 --cpu"
    with pytest.raises(UserError, match="--criterion output_layer_cross_entropy needs a model of this plugin"):
        run("train", data, "--save-dir", tmp_path, "--num-workers", 0, *small.split(), *training.split())


def test_criterion_of_a_model_without_a_decoder():
    criterion = OutputLayerCrossEntropy(object(), sentence_avg=False)
    with pytest.raises(UserError, match="--criterion output_layer_cross_entropy needs a model of this.* not Linear"):
        criterion(torch.nn.Linear(1, 1), {})
    criterion = AWDLSTMCrossEntropy(SimpleNamespace(target_dictionary=make_dictionary()), False)
    with pytest.raises(UserError, match="--criterion awd_lstm_cross_entropy needs a model of this plugin"):
        criterion(torch.nn.Linear(1, 1), {})


# ------------------------------------------------------------------------------------------ kill and resume

KILLED_BEFORE_UPDATE_6 = """
import os, signal
from fairseq_cli.train import cli_main  # first, for it sets up the log
from fairseq.trainer import Trainer

train_step = Trainer.train_step

def killed_step(trainer, *args, **kwargs):
    if trainer.get_num_updates() == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return train_step(trainer, *args, **kwargs)

Trainer.train_step = killed_step
cli_main()
"""


def loss_curve(*logs):
    """Update -> what was trained on and lost there; later logs win, as what a kill lost is done again."""
    lines = [line for log in logs for line in log["train_inner"]]
    return {int(line["num_updates"]): [line[name] for name in ("loss", "nll_loss", "gnorm", "wpb")] for line in lines}


@pytest.mark.slow
def test_resume_after_a_kill_equals_an_uninterrupted_run(data, tmp_path):
    """Epochs have 6 updates; the last checkpoint is that of update 4, and the kill comes after update 5."""
    more = "--dropout 0.2 --gate-dropout 0.2 --save-interval-updates 4 --max-update 14 --seed 3".split()
    args = train_args(data, tmp_path / "killed", *more)
    process = start(sys.executable, "-c", KILLED_BEFORE_UPDATE_6, *args)
    uninterrupted = run("train", *train_args(data, tmp_path / "whole", *more)).log
    stdout, stderr = process.communicate()
    assert process.returncode == -signal.SIGKILL, stderr
    killed = parse_log(stdout)
    assert list(loss_curve(killed)) == [1, 2, 3, 4, 5]
    state = torch.load(tmp_path / "killed" / "checkpoint_last.pt", weights_only=True)
    assert state["optimizer_history"][-1]["num_updates"] == 4

    resumed = run("train", *args).log
    assert list(loss_curve(resumed)) == list(range(5, 15))
    assert loss_curve(killed, resumed) == loss_curve(uninterrupted)
    assert loss_curve(resumed)[5] == loss_curve(killed)[5], "the update that the kill lost"
    for name in "train_loss", "train_nll_loss", "train_num_updates":  # averages over epochs, the killed one included
        assert [line[name] for line in resumed["train"]] == [line[name] for line in uninterrupted["train"]]
    valid_losses = {line["valid_num_updates"]: line["valid_loss"] for line in uninterrupted["valid"]}
    assert {line["valid_num_updates"]: line["valid_loss"] for line in resumed["valid"]}.items() < valid_losses.items()

    paths = (tmp_path / name / "checkpoint_last.pt" for name in ("whole", "killed"))
    whole, again = (torch.load(path, weights_only=True) for path in paths)
    for name, value in whole["model"].items():
        assert torch.equal(value, again["model"][name]), name
    for number, state in whole["last_optimizer_state"]["state"].items():
        for name in "exp_avg", "exp_avg_sq":
            assert torch.equal(state[name], again["last_optimizer_state"]["state"][number][name])


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--update-ordered-indices-seed"], ["--curriculum", 2]])
def test_a_training_resumed_later_has_the_same_batches(flags, data, tmp_path):
    """At the end of the first epoch and in the middle of the third; epochs have 6 updates."""
    more = ["--dropout", 0.2, "--seed", 3, *flags, "--max-update"]
    uninterrupted = loss_curve(run("train", *train_args(data, tmp_path / "whole", *more, "20")).log)
    for update in 6, 15:
        run("train", *train_args(data, tmp_path / str(update), *more, str(update)))
        resumed = loss_curve(run("train", *train_args(data, tmp_path / str(update), *more, "20")).log)
        assert resumed == {number: uninterrupted[number] for number in range(update + 1, 21)}


@pytest.mark.slow
def test_a_moving_average_goes_on_after_a_resume(data, tmp_path):
    """One of every third update, interrupted after the fourth."""
    more = "--dropout 0.2 --store-ema --ema-decay 0.9 --ema-update-freq 3 --max-update".split()
    for name, ends in (("whole", [9]), ("resumed", [4, 9])):
        for end in ends:
            run("train", *train_args(data, tmp_path / name, *more, end))
    paths = (tmp_path / name / "checkpoint_last.pt" for name in ("whole", "resumed"))
    whole, resumed = (torch.load(path, weights_only=True)["extra_state"]["ema"] for path in paths)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.slow
def test_patience_counts_across_interruptions(data, tmp_path):
    """With a learning rate of 0 validation never improves: an early stop after epoch 4, also of an interrupted run."""

    def epochs(*more):
        vars(should_stop_early).clear()  # as in a process of its own
        never_better = "--lr 0 --patience 3 --max-update 60".split()
        log = run("train", *train_args(data, tmp_path, *never_better, *more)).log
        return [line["epoch"] for line in log.get("valid", [])]

    assert epochs("--max-epoch", 2) == [1, 2]
    assert epochs("--max-epoch", 3) == [3]
    assert epochs() == [4]
    assert epochs() == [], "it ended: the same command again changes nothing"
    assert epochs("--patience", 5) == [5, 6]
    weights = ["--finetune-from-model", tmp_path / "checkpoint_last.pt", "--save-dir", tmp_path / "finetuned"]
    assert epochs(*weights) == [1, 2, 3, 4], "another training counts anew"
    assert epochs("--reset-meters") == [7, 8, 9, 10], "and so does one that is told to"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="of CPUs")
def test_bfloat16_of_one_training_leaves_no_trace_in_the_next(data, tmp_path):
    """The switch of attention is the process's: a training in float32 is the same after one in bfloat16."""
    for number, bf16 in enumerate((False, True, False)):
        run("train", *train_args(data, tmp_path / str(number), "--max-update", 1, *["--bf16"] * bf16))
        assert torch.backends.cuda.flash_sdp_enabled() == (not bf16)
    BaseFairseqModel.from_pretrained(str(tmp_path / "1"), "checkpoint_last.pt", str(data))
    assert torch.backends.cuda.flash_sdp_enabled(), "a model in float32, whatever it was trained in"


# ---------------------------------------------------------------------------------------- several processes


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "output_layer, update_freq, batches",
    [
        ("mixtape", 1, "--max-tokens 256 --max-update 2"),
        ("plif", 1, "--max-tokens 256 --max-update 2"),
        ("mixtape", 2, "--batch-size 72 --max-tokens 4096 --max-epoch 1"),  # 7 batches, of which a rank has 3
    ],
)
def test_two_processes_equal_one_on_the_joined_batch(output_layer, update_freq, batches, data, tmp_path):
    """Two ranks of a batch each, or of two, against one process that adds up the gradients of the same batches."""
    more = [*NO_NOISE, *f"--output-layer {output_layer} --optimizer sgd --lr 1 {batches}".split()]
    gloo = "--ddp-backend legacy_ddp --distributed-backend gloo --distributed-no-spawn --distributed-world-size 2"
    gloo = [*gloo.split(), "--distributed-init-method", f"tcp://127.0.0.1:{free_port()}", "--distributed-rank"]
    args = train_args(data, tmp_path / "two", *more, "--update-freq", update_freq, *gloo)
    ranks = [start(console_script("train"), *args, rank) for rank in (0, 1)]
    one = run("train", *train_args(data, tmp_path / "one", *more, "--update-freq", 2 * update_freq)).log["train_inner"]
    outputs = [rank.communicate() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    two = parse_log(outputs[0][0])["train_inner"]  # of rank 0

    assert len(one) == 2
    for name in "num_updates", "loss", "nll_loss", "gnorm", "wpb", "bsz":
        assert [line[name] for line in two] == [line[name] for line in one]
    assert float(one[1]["loss"]) < float(one[0]["loss"]) - 0.1, "the first update changed the model"
    paths = [tmp_path / name / "checkpoint_last.pt" for name in ("one", "two")]
    assert_same_parameters(*paths, rtol=0, atol=1e-6)


# ------------------------------------------------------------------------------------------------ precision


def train_and_generate(data, folder, output_layer, device, *precision):
    """Trains and generates with the option, and gives the parameters saved, which fairseq turns into float32."""
    on_gpu = device == "gpu"
    more = f"--output-layer {output_layer} --label-smoothing 0.1 --max-update 20".split()
    args = [arg for arg in train_args(data, folder, *more, *precision) if not (on_gpu and arg == "--cpu")]
    args += ["--distributed-world-size", "1"]  # of several GPUs fairseq would start a process each
    losses = [float(line["loss"]) for line in run("train", *args).log["train_inner"]]
    assert all(map(math.isfinite, losses)) and losses[-1] < losses[0] - 1
    args = generate_args(data, folder / "checkpoint_last.pt", "--gen-subset", "test1")
    args += precision[:1] if precision != ("--amp",) else []
    stdout = run("generate", *(arg for arg in args if not (on_gpu and arg == "--cpu"))).stdout
    assert sorted(hypotheses(stdout)) == list(range(SENTENCES["five"]))
    assert "nan" not in stdout
    return load_parameters(folder / "checkpoint_last.pt")


def fits(parameters, dtype):
    return all(torch.equal(value, value.to(dtype).to(value.dtype)) for value in parameters.values())


@pytest.mark.slow
@pytest.mark.parametrize("output_layer", ["mixtape", "mos"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_bf16(device, output_layer, data, tmp_path):
    assert fits(train_and_generate(data, tmp_path, output_layer, device, "--bf16"), torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("output_layer", ["mixtape", "mos"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_fp16(device, output_layer, data, tmp_path):
    """With its default of flat gradients, fairseq's --fp16 needs a GPU."""
    options = ["--fp16", "--fp16-no-flatten-grads"] if device == "cpu" else ["--fp16"]
    assert fits(train_and_generate(data, tmp_path, output_layer, device, *options), torch.float16)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_amp(device, data, tmp_path):
    """On a CPU it is plain float32: fairseq asks for CUDA's autocast."""
    assert not fits(train_and_generate(data, tmp_path, "mixtape", device, "--amp"), torch.bfloat16)


def test_one_loss_a_token_is_refused():
    criterion = OutputLayerCrossEntropy(SimpleNamespace(target_dictionary=make_dictionary()), sentence_avg=False)
    with pytest.raises(ValueError, match="cross_entropy"):
        criterion(None, None, reduce=False)
