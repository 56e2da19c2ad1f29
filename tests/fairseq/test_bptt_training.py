"""Training of language models: what a step is, small batches, processes, number formats, shards."""

from types import SimpleNamespace

import pytest
import torch
from conftest import console_script, make_dictionary, parse_log, run, start
from fairseq.trainer import Trainer
from test_training import assert_same_parameters, free_port, loss_curve
from toy_language_models import build
from toy_text import NO_DROPOUT, lm_args, toy_text, write_text  # noqa: F401

from mixtape_plugin.data.bptt_dataset import TokenStream
from mixtape_plugin.tasks.bptt_language_modeling import BpttLanguageModelingConfig, BpttLanguageModelingTask


@pytest.mark.slow
def test_log_says_what_training_leaves_out(text, tmp_path):
    more = "--batch-size 7 --max-epoch 1 --tokens-per-sample 99 --no-save".split()
    output = run("train", *lm_args(text, tmp_path, *more))
    assert "train: 1 of 1,800 tokens do not fill a step of 7 columns and are left out" in output.stdout
    assert sum(float(line["wpb"]) for line in output.log["train_inner"]) == 1799


@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, [30, 30, 30, 10]),
        ({"short_segment_probability": 1.0}, [15] * 6 + [10]),
        ({"min_segment_length": 40}, [40, 40, 20]),
        ({"max_segment_length": 28}, [28, 28, 28, 16]),
    ],
)
def test_the_options_of_segments_reach_them(options, expected):
    """200 tokens in 2 columns, for a segment of 30 without spread: the last one is cut off at the end of the text."""
    options = {"segment_length_std": 0.0, "short_segment_probability": 0.0, **options}
    config = BpttLanguageModelingConfig(tokens_per_sample=30, train_subset="train", **options)
    task = BpttLanguageModelingTask(config, make_dictionary())
    text = TokenStream(torch.full((200,), 4), task.dictionary.eos(), task.dictionary.pad(), "train")
    batches = task.get_batch_iterator(text, max_sentences=2, grouped_shuffling=False).next_epoch_itr(shuffle=False)
    assert [batch["target"].shape[1] for batch in batches] == expected


@pytest.mark.slow
def test_small_batches_equal_the_whole(text, tmp_path):
    """Gradients of 4 columns at once, and of 3 and 1: the same training, up to rounding."""
    more = [*NO_DROPOUT, "--max-epoch", 1, "--no-epoch-checkpoints", "--weight-decay", 0]
    logs = []
    for size in 4, 3:
        args = lm_args(text, tmp_path / str(size), *more, "--small-batch-size", size)
        logs.append([float(line["nll_loss"]) for line in run("train", *args).log["train_inner"]])
    assert logs[0] == pytest.approx(logs[1], abs=2e-3) and len(logs[0]) > 10
    # The last segments' penalties are means over 3 columns and 1, weighted: the same mean.
    assert_same_parameters(*(tmp_path / size / "checkpoint_last.pt" for size in "43"), rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("seed, update_freq", [(28, 1), (28, 3)])
def test_learning_rate_follows_the_segments_after_clipping(text, tmp_path, seed, update_freq, monkeypatch):
    """Each SGD step is lr·L/base times the clipped gradient, L the mean length of the update's segments.

    What a first try, given up in the middle, has seen of the third update does not count.
    """
    steps, tries = [], []
    optimizer_step, train_step = BpttLanguageModelingTask.optimizer_step, Trainer.train_step

    def watched_train_step(trainer, samples, *args, **kwargs):
        if len(tries) == 2:
            trainer.zero_grad()
            trainer.task.train_step(samples[-1], trainer.model, trainer.criterion, trainer.optimizer, 2)
            trainer.zero_grad()  # as after an overflow
        tries.append(sum(sample["target"].size(1) for sample in samples) / len(samples) / 35)
        return train_step(trainer, samples, *args, **kwargs)

    def watched_step(task, optimizer, model, update_num):
        before = [p.detach().clone() for p in optimizer.params]
        gradients = [p.grad.clone() for p in optimizer.params]
        optimizer_step(task, optimizer, model, update_num)
        moved = torch.cat([(p.detach() - b).flatten() for p, b in zip(optimizer.params, before)])
        steps.append((tries[-1], moved, torch.cat([g.flatten() for g in gradients]), optimizer.get_lr()))

    monkeypatch.setattr(Trainer, "train_step", watched_train_step)
    monkeypatch.setattr(BpttLanguageModelingTask, "optimizer_step", watched_step)
    more = ["--max-update", 4, "--seed", seed, "--weight-decay", 0, "--no-save", "--update-freq", update_freq]
    run("train", *lm_args(text, tmp_path, *more))
    assert len({scale for scale, *_ in steps}) > 1
    for scale, moved, gradient, lr in steps:
        assert gradient.norm() < 0.2501 and lr == 5
        torch.testing.assert_close(moved, -5 * scale * gradient, rtol=1e-3, atol=1e-6)


def test_the_segments_of_an_update_count_also_where_a_parameter_is_frozen():
    """Which never has a gradient, as all have none where an update begins."""
    model, rates = build("plif", freeze_plif=True), []
    task = BpttLanguageModelingTask(BpttLanguageModelingConfig(), model.decoder.dictionary)
    task.begin_epoch(1, model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert len(trained) < len(list(model.parameters()))
    optimizer = SimpleNamespace(
        backward=lambda loss: loss.backward(), get_lr=lambda: 8.0, set_lr=rates.append, step=lambda: None
    )
    for update, scales in enumerate([(1.0, 0.5), (2.0, 1.0)]):
        for segment, scale in enumerate(scales, 2 * update):
            sample = {"net_input": {"first_segment": segment == 0}, "nsentences": 4, "lr_scale": scale}
            sample.update({"segment": segment, "last_segment": segment == 3})
            task.train_step(sample, model, lambda *_: (sum(p.sum() for p in trained), 1, {}), optimizer, update)
        task.optimizer_step(optimizer, model, update)
        model.zero_grad()
    assert rates == [8 * 0.75, 8, 8 * 1.5, 8]


@pytest.mark.slow
def test_validation_on_the_training_text_does_not_change_the_training(text, tmp_path):
    more = [*NO_DROPOUT, *"--max-epoch 2 --validate-interval-updates 3 --seed 3".split()]
    alone, beside = (
        run("train", *lm_args(text, tmp_path / subsets, *more, "--valid-subset", subsets)).log
        for subsets in ("valid", "valid,train")
    )
    assert loss_curve(alone) == loss_curve(beside)
    assert len(beside["train"]) > len(alone["train"]), "those of validation bear the split's name"


@pytest.mark.slow
def test_the_average_is_saved_without_validation_too(text, tmp_path):
    more = ["--averaging-epoch", 0, "--max-epoch", 1, "--disable-validation"]
    run("train", *lm_args(text, tmp_path, *more))
    state = torch.load(tmp_path / "checkpoint_last.pt", weights_only=True)
    average = [entry["ax"] for entry in state["last_optimizer_state"]["optimizer"]["state"].values()]
    assert all(any(torch.equal(ax, value) for value in state["model"].values()) for ax in average)


@pytest.mark.slow
def test_two_processes_equal_one_with_as_many_columns(text, tmp_path):
    """2·2 columns are 4; validation shares its 3. A kill in mid-epoch loses neither's hidden state.

    Nor does it where there was no validation before the checkpoint.
    """
    more = [*NO_DROPOUT, "--max-epoch", 1, "--averaging-epoch", 0, "--save-interval-updates", 4, "--max-update", 9]
    more += ["--validate-after-updates", 9]
    one = run("train", *lm_args(text, tmp_path / "one", *more)).log
    gloo = "--ddp-backend legacy_ddp --distributed-backend gloo --distributed-no-spawn --distributed-world-size 2"

    def train_two(*more):
        args = [*gloo.split(), "--distributed-init-method", f"tcp://127.0.0.1:{free_port()}", "--distributed-rank"]
        args = lm_args(text, tmp_path / "two", *more, "--batch-size", 2, *args)
        ranks = [start(console_script("train"), *args, rank) for rank in (0, 1)]
        outputs = [rank.communicate() for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], outputs
        return parse_log(outputs[0][0])

    first = train_two(*more, "--max-update", 4)
    rest = train_two(*more)
    lines = first["train_inner"] + rest["train_inner"]
    for name in "num_updates", "wpb":
        assert [line[name] for line in lines] == [line[name] for line in one["train_inner"]]
    losses = [[float(line["loss"]) for line in log] for log in (lines, one["train_inner"])]
    assert losses[0] == pytest.approx(losses[1], abs=2e-3)
    assert float(rest["valid"][-1]["valid_loss"]) == pytest.approx(float(one["valid"][-1]["valid_loss"]), abs=2e-3)
    paths = [tmp_path / name / "checkpoint_last.pt" for name in ("one", "two")]
    assert_same_parameters(*paths, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_bf16_averages_in_float32(text, tmp_path):
    more = ["--bf16", "--averaging-epoch", 0, "--max-epoch", 2, "--no-epoch-checkpoints", "--lr", 20]
    run("train", *lm_args(text, tmp_path, *more))
    state = torch.load(tmp_path / "checkpoint_last.pt", weights_only=True)
    optimizer = state["last_optimizer_state"]
    average, raw = (
        torch.cat([part.flatten() for part in parts])
        for parts in ([entry["ax"] for entry in optimizer["optimizer"]["state"].values()], optimizer["raw"])
    )
    assert not torch.equal(average, average.bfloat16().float())
    others = ("decoder.output_projection.weight", "decoder.vocabulary_version")  # tied; no parameter
    model = torch.cat([value.flatten() for name, value in state["model"].items() if name not in others])
    assert torch.equal(model, average.bfloat16().float())
    assert not torch.equal(raw, average)


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["--amp --averaging-epoch 0", "--optimizer adam --lr 0.05 --store-ema"])
def test_ways_to_train_beside_the_recipes(flags, text, tmp_path):
    log = run("train", *lm_args(text, tmp_path, *flags.split(), "--max-epoch", 1)).log
    assert float(log["valid"][-1]["valid_ppl"]) < 22, "20 words and </s>, of which it has to learn something"


@pytest.mark.slow
def test_shards_one_an_epoch(text, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    write_text(tmp_path / "train", 100, 9)
    dictionary = ["--srcdict", text / "dict.txt"]
    run("preprocess", "--only-source", "--trainpref", tmp_path / "train", "--destdir", other, *dictionary)
    more = ["--max-epoch", 3, "--no-epoch-checkpoints", "--batch-size", 10]
    lines = run("train", *lm_args(f"{text}:{other}", tmp_path / "save", *more)).stdout.splitlines()
    sizes = [line.split("/train: ")[1] for line in lines if "/train: " in line]
    assert [size.split()[0] for size in sizes][:3] == ["1,800", "900", "1,800"]
