"""Language models through fairseq's commands: counting, evaluation, resume, processes, small batches, bad input."""

import math
import shutil
import signal
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import USER_DIR, console_script, parse_log, run, start
from fairseq import options, tasks
from fairseq.sequence_scorer import SequenceScorer
from fairseq.trainer import Trainer
from recipes import files
from test_training import KILLED_BEFORE_UPDATE_6, assert_same_parameters, free_port, loss_curve

from mixtape_plugin.errors import UserError, sentence_for_user
from mixtape_plugin.evaluation.language_model import load_language_model, perplexity
from mixtape_plugin.optim.nt_asgd import NTASGD
from mixtape_plugin.tasks.bptt_language_modeling import BpttLanguageModelingTask

VALID_TOKENS = 50 * 9  # lines of 8 words and </s>
NO_DROPOUT = "--dropout 0 --input-dropout 0 --hidden-dropout 0 --embedding-dropout 0 --weight-dropout 0".split()


def write_text(path, lines, seed):
    """Lines of 8 of 20 words, each likely to be followed by the next in the list."""
    generator = torch.Generator().manual_seed(seed)
    with open(path, "w") as file:
        for _ in range(lines):
            word = int(torch.randint(20, (), generator=generator))
            words = []
            for _ in range(8):
                words.append(f"w{word}")
                word = (word + 1 + int(torch.rand((), generator=generator) < 0.3)) % 20
            file.write(" ".join(words) + "\n")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for seed, (split, lines) in enumerate({"train": 200, "valid": 50, "test": 30}.items()):
        write_text(folder / split, lines, seed)
    (folder / "blank").write_text("\nw1 w2\n\n")
    (folder / "short").write_text("w1 w2\n")
    (folder / "foreign").write_text("w1 xyzzy w2\nplugh\n")
    prefixes = [f"--trainpref={folder}/train", f"--validpref={folder}/valid"]
    tests = ",".join(str(folder / name) for name in ("test", "blank", "short", "foreign"))
    run("preprocess", "--only-source", *prefixes, f"--testpref={tests}", "--destdir", folder / "bin")
    return folder / "bin"


def lm_args(data, save_dir, *more):
    """A small training: 4 columns, epochs of 450 steps in segments of about 35."""
    folders = [data, "--save-dir", save_dir, "--user-dir", USER_DIR, "--task", "bptt_language_modeling"]
    model = "--arch awd_lstm_lm --embed-dim 8 --hidden-sizes 12,10 --gate-dim 5 --gate-noise 0 --frequent-ratio 0.5"
    training = "--criterion awd_lstm_cross_entropy --optimizer nt_asgd --lr 5 --clip-norm 0.25 --weight-decay 1e-5"
    batches = "--batch-size 4 --batch-size-valid 3 --tokens-per-sample 35"
    logs = "--log-format json --log-interval 1 --cpu --num-workers 0"
    return [*folders, *f"{model} {training} {batches} {logs}".split(), *more]


def evaluate(data, path, *more):
    """Perplexity and number of tokens that fairseq-eval-lm prints."""
    args = [data, "--user-dir", USER_DIR, "--task", "bptt_language_modeling", "--path", path, "--cpu"]
    lines = run("eval_lm", *args, "--num-workers", 0, *more).stdout.splitlines()
    (result,) = (line for line in lines if "Perplexity: " in line)
    (counted,) = (line for line in lines if "Evaluated " in line)
    loss = float(result.split("Loss (base 2): ")[1].split(",")[0])
    return loss, int(counted.split("Evaluated ")[1].split()[0].replace(",", ""))


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    more = "--optimizer adam --lr 0.05 --max-epoch 6 --no-epoch-checkpoints".split()
    log = run("train", *lm_args(text, folder, *NO_DROPOUT, *more)).log
    assert float(log["valid"][-1]["valid_ppl"]) < 15, "20 words, of which it has to learn something"
    return folder / "checkpoint_last.pt", log


# -------------------------------------------------------------------------------------------------- evaluation


@pytest.mark.slow
def test_every_evaluation_agrees(text, trained):
    """Whatever the segment length, through validation, fairseq-eval-lm, fairseq-validate and our own loop."""
    path, log = trained
    valid = log["valid"][-1]
    assert valid["valid_loss"] == valid["valid_nll_loss"]
    for length in 1, 7, 35, 70:
        flags = ["--gen-subset", "valid", "--batch-size", 3, "--tokens-per-sample", length]
        loss, tokens = evaluate(text, path, *flags)
        assert tokens == VALID_TOKENS
        assert loss == pytest.approx(float(valid["valid_loss"]), abs=6e-4)  # both are rounded
        model, task = load_language_model(str(path), str(text))
        assert math.log2(perplexity(model, task, "valid", columns=3, length=length).perplexity) == pytest.approx(
            loss, abs=1e-4
        )
    args = [text, "--user-dir", USER_DIR, "--task", "bptt_language_modeling", "--path", path, "--cpu"]
    args += "--valid-subset valid --batch-size 3 --num-workers 0 --log-format json".split()
    line = run("validate", *args).log["valid"][-1]
    assert float(line["valid_loss"]) == pytest.approx(float(valid["valid_loss"]), abs=6e-4)


@pytest.mark.slow
def test_test_set_one_column_by_default(text, trained):
    path, _ = trained
    assert evaluate(text, path, "--gen-subset", "test") == evaluate(
        text, path, "--gen-subset", "test", "--batch-size", 1
    )
    assert evaluate(text, path, "--gen-subset", "test")[1] == 30 * 9


@pytest.mark.slow
def test_blank_lines_and_unknown_words_count(text, trained):
    path, _ = trained
    assert evaluate(text, path, "--gen-subset", "test1")[1] == 5  # two blank lines, two words, a </s>
    assert evaluate(text, path, "--gen-subset", "test3")[1] == 6
    args = [text, "--user-dir", USER_DIR, "--task", "bptt_language_modeling", "--path", path, "--cpu"]
    assert "6 tokens, 2 of them <unk>" in run("eval_lm", *args, "--gen-subset", "test3").stdout


@pytest.mark.slow
def test_continues_a_prompt(text, trained, monkeypatch):
    path, _ = trained
    monkeypatch.setattr("fairseq_cli.interactive.fileinput.input", lambda **_: open_lines(["w3 w4 w5"]))
    args = [text, "--user-dir", USER_DIR, "--task", "bptt_language_modeling", "--path", path, "--cpu", "--beam", 2]
    stdout = run("interactive", *args).stdout
    (best,) = (line.split("\t")[2] for line in stdout.splitlines() if line.startswith("H-"))
    assert best.startswith("w3 w4 w5 w")
    # each token's score is what the model gives it after all those before it, log base 2
    (scores,) = (line.split("\t")[1].split() for line in stdout.splitlines() if line.startswith("P-"))
    model, task = load_language_model(str(path), str(text))
    tokens = task.dictionary.encode_line(best, add_if_not_exist=False).long()
    with torch.no_grad():
        features, _ = model(tokens.roll(1).unsqueeze(0), features_only=True)
        log_probs = model.decoder.output_projection.log_probs(features)[0]
    expected = log_probs.gather(1, tokens.unsqueeze(1)).squeeze(1) / math.log(2)
    torch.testing.assert_close(torch.tensor([float(score) for score in scores]), expected, atol=2e-4, rtol=0)
    for masked in "madeupword", "<s>", "<pad>":
        assert masked not in best


def open_lines(lines):
    class Lines(list):
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    return Lines(line + "\n" for line in lines)


# ---------------------------------------------------------------------------------------------------- training


@pytest.mark.slow
def test_log_says_what_training_leaves_out(text, tmp_path):
    more = "--batch-size 7 --max-epoch 1 --tokens-per-sample 99 --no-save".split()
    output = run("train", *lm_args(text, tmp_path, *more))
    assert "train: 1 of 1,800 tokens do not fill a step of 7 columns and are left out" in output.stdout
    assert sum(float(line["wpb"]) for line in output.log["train_inner"]) == 1799


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


# The history of the toy training does not matter here: the trigger is forced by its epoch, or by validation.
RESUMES = {
    "sgd": ["--nonmono", 5],
    "asgd": ["--averaging-epoch", 0],
    "trigger": ["--averaging-epoch", 1],
    "trigger with --amp": ["--averaging-epoch", 1, "--amp"],
}


@pytest.mark.slow
@pytest.mark.parametrize("phase", RESUMES)
def test_resume_after_a_kill_in_mid_epoch_equals_an_uninterrupted_run(phase, text, tmp_path):
    """Killed after update 5, the last checkpoint being that of update 4: the hidden state is carried over."""
    more = [*RESUMES[phase], "--save-interval-updates", 4, "--max-epoch", 3, "--seed", 3, "--small-batch-size", 3]
    more += ["--context-dropout", 0.2, "--locked-context-dropout", "--gate-noise", 0.1]
    process = start(sys.executable, "-c", KILLED_BEFORE_UPDATE_6, *lm_args(text, tmp_path / "killed", *more))
    uninterrupted = run("train", *lm_args(text, tmp_path / "whole", *more)).log
    stdout, stderr = process.communicate()
    assert process.returncode == -signal.SIGKILL, stderr
    resumed = run("train", *lm_args(text, tmp_path / "killed", *more)).log
    assert min(loss_curve(resumed)) == 5
    assert loss_curve(parse_log(stdout), resumed) == loss_curve(uninterrupted)
    assert resumed["valid"][-1]["valid_loss"] == uninterrupted["valid"][-1]["valid_loss"]
    check_same_checkpoints(tmp_path / "whole", tmp_path / "killed", phase)


@pytest.mark.slow
@pytest.mark.parametrize("option, value", [("--batch-size", 5), ("--tokens-per-sample", 30), ("--seed", 4)])
def test_a_resume_in_mid_epoch_at_another_place_of_the_text_is_refused(option, value, text, tmp_path):
    run("train", *lm_args(text, tmp_path, "--max-update", 6, "--seed", 3))
    before = files(tmp_path)
    with pytest.raises(
        UserError, match=f"in the middle of an epoch with {option} [0-9]+, and cannot be resumed with {value}:"
    ):
        run("train", *lm_args(text, tmp_path, "--max-update", 9, "--seed", 3, option, value))
    assert files(tmp_path) == before


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
def test_a_learning_rate_by_validation_reaches_averaged_sgd(text, tmp_path):
    """--lr-scheduler reduce_lr_on_plateau lowers it after every second epoch here, also of a training that is resumed
    after each, and in mid-epoch."""
    plateau = "--lr-scheduler reduce_lr_on_plateau --lr-patience 1 --lr-threshold 0.9 --lr-shrink 0.5".split()
    more = [*plateau, "--averaging-epoch", 1, "--seed", 3]

    def rates(folder, *ends):
        logs = [run("train", *lm_args(text, tmp_path / folder, *more, *end)).log for end in ends]
        return [(line["epoch"], line["train_lr"]) for log in logs for line in log["train"]]

    expected = [(1, "5"), (2, "5"), (3, "5"), (4, "2.5"), (5, "2.5"), (6, "1.25"), (7, "1.25")]
    assert rates("whole", ["--max-epoch", 7]) == expected
    ends = [["--max-epoch", epoch] for epoch in (1, 2, 3, 4, 5)]
    assert rates("resumed", *ends, ["--max-update", 75], ["--max-epoch", 7]) == [*expected[:6], *expected[5:]]


def check_same_checkpoints(whole, resumed, phase):
    paths = [folder / "checkpoint_last.pt" for folder in (whole, resumed)]
    whole, again = (torch.load(path, weights_only=True) for path in paths)
    assert_same_parameters(*paths, rtol=0, atol=0)
    state, other = whole["last_optimizer_state"], again["last_optimizer_state"]
    assert state["phase"] == other["phase"] == ("sgd" if phase == "sgd" else "asgd")
    assert state["history"] == other["history"]
    if phase != "sgd":
        assert all(torch.equal(raw, other_raw) for raw, other_raw in zip(state["raw"], other["raw"]))
        first = whole["model"]["decoder.embed_tokens.weight"]
        assert not torch.equal(first, state["raw"][0]), "the model holds the average, not the raw weights"


def let_validations_get_worse(patch):
    """Each worse than the one before: the trigger fires as soon as it may."""
    end_epoch = NTASGD.end_epoch
    patch.setattr(NTASGD, "end_epoch", lambda optimizer, loss: end_epoch(optimizer, len(optimizer.history) + loss * 0))


TRIGGERED = ["--nonmono", 1, "--seed", 3, "--batch-size", 8]


@pytest.fixture(scope="module")
def trained_whole(text, tmp_path_factory):
    """Five epochs, the third of which triggers averaging: the folder of their checkpoints and the log."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        let_validations_get_worse(patch)
        log = run("train", *lm_args(text, folder, *TRIGGERED, "--max-epoch", 5)).log
    return folder, log


@pytest.mark.parametrize("last", [2, 3, 4])
def test_resume_at_an_epochs_end_equals_an_uninterrupted_run(last, text, trained_whole, tmp_path, monkeypatch):
    """Before, at and after the epoch whose validation triggers averaging."""
    whole, uninterrupted = trained_whole
    let_validations_get_worse(monkeypatch)
    # A training that ended with epoch `last` left this, and no more: the later ones are not looked at.
    shutil.copy(whole / f"checkpoint{last}.pt", tmp_path / "checkpoint_last.pt")
    phase = torch.load(tmp_path / "checkpoint_last.pt", weights_only=True)["last_optimizer_state"]["phase"]
    assert phase == ("sgd" if last < 3 else "asgd")
    resumed = run("train", *lm_args(text, tmp_path, *TRIGGERED, "--max-epoch", 5)).log
    curve = loss_curve(uninterrupted)
    assert loss_curve(resumed) == {update: curve[update] for update in loss_curve(resumed)}
    assert len(resumed["valid"]) == 5 - last
    check_same_checkpoints(whole, tmp_path, "asgd")


@pytest.mark.slow
def test_the_average_is_saved_without_validation_too(text, tmp_path):
    more = ["--averaging-epoch", 0, "--max-epoch", 1, "--disable-validation"]
    run("train", *lm_args(text, tmp_path, *more))
    state = torch.load(tmp_path / "checkpoint_last.pt", weights_only=True)
    average = [entry["ax"] for entry in state["last_optimizer_state"]["optimizer"]["state"].values()]
    assert all(any(torch.equal(ax, value) for value in state["model"].values()) for ax in average)


@pytest.mark.slow
def test_fine_tuning_ends_by_itself(text, trained, tmp_path, monkeypatch):
    let_validations_get_worse(monkeypatch)
    path, _ = trained
    more = ["--finetune-from-model", path, "--averaging-epoch", 0, "--stop-when-nonmonotone", "--nonmono", 2]
    log = run("train", *lm_args(text, tmp_path, *more, "--max-epoch", 9, "--no-epoch-checkpoints")).log
    assert len(log["valid"]) == 4
    log = run("train", *lm_args(text, tmp_path, *more, "--max-epoch", 9)).log
    assert "train_inner" not in log, "started again it has nothing to do"


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


@pytest.mark.slow
def test_characters_without_lines(tmp_path, monkeypatch):
    """27 symbols, </s> and <unk> masked: bits per character of a uniform model are log2 27."""
    letters = "abcdefghijklmnopqrstuvwxyz_"
    for split, repeats in ("train", 40), ("valid", 10):
        lines = [" ".join(letters)] * repeats
        (tmp_path / split).write_text("\n".join(lines) + "\n")
    prefixes = [f"--{split}pref={tmp_path}/{split}" for split in ("train", "valid")]
    run("preprocess", "--only-source", "--padding-factor", 1, "--destdir", tmp_path / "bin", *prefixes)
    more = ["--remove-eos", "--report-bpc", "--lr", 1e-9, "--max-epoch", 1, "--frequent-ratio", 1]
    log = run("train", *lm_args(tmp_path / "bin", tmp_path / "save", *more, "--output-layer", "mos")).log
    assert float(log["valid"][-1]["valid_bpc"]) == pytest.approx(math.log2(27), abs=0.02)
    path = tmp_path / "save" / "checkpoint_last.pt"
    assert evaluate(tmp_path / "bin", path, "--gen-subset", "valid", "--remove-eos")[1] == 270
    with pytest.raises(UserError, match="the checkpoint was trained with --remove-eos: do the same here"):
        evaluate(tmp_path / "bin", path, "--gen-subset", "valid")
    monkeypatch.setattr("fairseq_cli.interactive.fileinput.input", lambda **_: open_lines(["a b c"]))
    args = "--task bptt_language_modeling --remove-eos --cpu --path".split()
    with pytest.raises(UserError, match="predicts no </s>, .*: it cannot continue a prompt"):
        run("interactive", tmp_path / "bin", "--user-dir", USER_DIR, *args, path)
    model, task = load_language_model(str(path), str(tmp_path / "bin"))  # to be scored a text needs no </s>
    tokens = torch.tensor([[4, 5, 6]])
    sample = {"net_input": {"src_tokens": tokens, "src_lengths": torch.tensor([3])}, "target": tokens}
    ((scored,),) = task.inference_step(SequenceScorer(task.dictionary), [model], sample)
    assert scored["positional_scores"].tolist() == pytest.approx([-math.log(27)] * 3, abs=0.1)


# --------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "override, sentence",
    [
        ({"dropout": "x"}, "--dropout 'x' is not allowed: a number"),
        ({"embed_dim": 2.5}, "--embed-dim 2.5 is not allowed: a whole number"),
        ({"untie_embeddings": None}, "--untie-embeddings None is not allowed: True or False"),
    ],
)
def test_values_of_another_type_are_refused(override, sentence, text, tmp_path):
    """As --model-overrides or a yaml file may have them."""
    args = options.parse_args_and_arch(options.get_training_parser(), list(map(str, lm_args(text, tmp_path))))
    vars(args).update(override)
    with pytest.raises(UserError, match=f"^{sentence}$"):
        tasks.setup_task(args).build_model(args)


@pytest.mark.parametrize(
    "option, value, allowed",
    [
        ("--tokens-per-sample", 0, "at least 1"),
        ("--segment-length-std", -1.0, "0 or more"),
        ("--segment-length-std", math.inf, "0 or more, and finite"),
        ("--short-segment-probability", 1.5, "from 0 to 1"),
        ("--min-segment-length", 0, "at least 1"),
        ("--max-segment-length", 0, "at least 1, or left out"),
        ("--max-segment-length", 4, "--min-segment-length 5 or more"),
        ("--small-batch-size", 0, "at least 1, or left out"),
        ("--embed-dim", 0, "at least 1"),
        ("--hidden-sizes", "12,x", "whole numbers"),
        ("--hidden-sizes", "12,²", "whole numbers"),
        ("--weight-dropout", 1.0, "from 0 to less than 1"),
        ("--input-dropout", math.nan, "from 0 to less than 1, and finite"),
    ],
)
def test_options_of_task_and_model_are_checked(option, value, allowed, text, tmp_path):
    """Which fairseq-train builds first."""
    args = list(map(str, lm_args(text, tmp_path, f"{option}={value}")))
    args = options.parse_args_and_arch(options.get_training_parser(), args)
    with pytest.raises(UserError, match=f"{option} {value} is not allowed: {allowed}"):
        tasks.setup_task(args).build_model(args)


@pytest.mark.parametrize(
    "option, value, allowed",
    [
        ("--ar-alpha", -1.0, "0 or more"),
        ("--ar-alpha", math.inf, "0 or more, and finite"),
        ("--tar-beta", math.nan, "0 or more, and finite"),
        ("--weight-decay", math.inf, "0 or more, and finite"),
        ("--nonmono", 0, "at least 1"),
        ("--averaging-epoch", -1, "0 or more"),
    ],
)
def test_options_of_criterion_and_optimizer_are_checked(option, value, allowed, text, tmp_path):
    with pytest.raises(UserError, match=f"{option} {value} is not allowed: {allowed}"):
        run("train", *lm_args(text, tmp_path, f"{option}={value}"))


def test_text_shorter_than_its_columns(text, trained, tmp_path):
    with pytest.raises(UserError, match="the test2 text has 3 tokens, too few for 4 columns"):
        evaluate(text, trained[0], "--gen-subset", "test2", "--batch-size", 4)
    with pytest.raises(UserError, match="the train text has 1800 tokens, too few for 2000 columns"):
        run("train", *lm_args(text, tmp_path, "--batch-size", 2000))


def test_empty_text(text, tmp_path):
    (tmp_path / "train").write_text("")
    run(
        "preprocess",
        "--only-source",
        "--trainpref",
        tmp_path / "train",
        "--destdir",
        tmp_path,
        "--srcdict",
        text / "dict.txt",
    )
    with pytest.raises(UserError, match="train.bin holds no (line|sentence)"):
        run("train", *lm_args(tmp_path, tmp_path / "save", "--disable-validation"))


def test_no_batch_size(text, tmp_path):
    args = [arg for arg in lm_args(text, tmp_path) if arg not in ("--batch-size", "4")]
    with pytest.raises(UserError, match="needs --batch-size"):
        run("train", *args, "--max-tokens", 100)


@pytest.mark.slow
@pytest.mark.parametrize("change", ["other order", "other words", "fewer words"])
def test_dictionary_that_does_not_match_the_checkpoint(change, text, trained, tmp_path):
    """In evaluation, and where a training resumes or begins from the checkpoint."""
    symbols = (text / "dict.txt").read_text().splitlines()
    changed = {
        "other order": symbols[1::-1] + symbols[2:],
        "other words": [line.replace("w", "v") for line in symbols],
        "fewer words": symbols[:-1],
    }[change]
    (tmp_path / "dict.txt").write_text("\n".join(changed) + "\n")
    (tmp_path / "text").write_text("w1 v1 w2\n" * 50)
    prefixes = [f"--trainpref={tmp_path}/text", f"--validpref={tmp_path}/text", "--srcdict", tmp_path / "dict.txt"]
    run("preprocess", "--only-source", *prefixes, "--destdir", tmp_path / "bin")
    save, path = tmp_path / "save", trained[0]
    save.mkdir()
    shutil.copy(path, save / "checkpoint_last.pt")
    before = files(save)
    message = "is not the one that the checkpoint was trained with"
    with pytest.raises(UserError, match=message):
        evaluate(tmp_path / "bin", path, "--gen-subset", "valid")
    for folder, *flags in (
        [save],
        [tmp_path / "other", "--restore-file", path],
        [tmp_path / "finetuned", "--finetune-from-model", path],
    ):
        args = lm_args(tmp_path / "bin", folder, "--optimizer", "adam", "--max-epoch", 9, "--frequent-ratio", 1, *flags)
        with pytest.raises(Exception) as error:
            run("train", *args)
        assert message in sentence_for_user(error.value)
    assert files(save) == before and list(tmp_path.glob("*/*.pt")) == [save / "checkpoint_last.pt"]


@pytest.mark.slow
def test_a_checkpoint_without_its_vocabulary_is_taken(text, trained, tmp_path):
    state = torch.load(trained[0], weights_only=True)
    del state["model"]["decoder.vocabulary_version"]
    torch.save(state, tmp_path / "old.pt")
    flags = ["--gen-subset", "test"]
    assert evaluate(text, tmp_path / "old.pt", *flags) == evaluate(text, trained[0], *flags)


@pytest.fixture
def no_loss_scale(monkeypatch):
    """--amp as it is without CUDA, on machines that have it, too."""
    monkeypatch.setattr(torch.cuda.amp, "GradScaler", lambda **options: torch.amp.GradScaler("cpu", enabled=False))


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--amp"]])
def test_loss_that_is_not_finite_keeps_the_last_checkpoint(flags, text, tmp_path, no_loss_scale):
    run("train", *lm_args(text, tmp_path, "--max-epoch", 1, *flags))
    last = tmp_path / "checkpoint_last.pt"
    before = last.read_bytes()
    state = torch.load(last, weights_only=True)
    updates = state["optimizer_history"][-1]["num_updates"]
    state["model"]["decoder.output_projection.bias"][5] = math.inf
    torch.save(state, tmp_path / "poisoned.pt")
    more = ["--restore-file", tmp_path / "poisoned.pt", "--max-epoch", 2, *flags]
    with pytest.raises(UserError, match=rf"the loss is nan at update {updates + 1} \(epoch 2\)"):
        run("train", *lm_args(text, tmp_path, *more))
    assert last.read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize("save", [[], ["--save-interval-updates", 1]])
def test_validation_loss_that_is_not_finite_keeps_the_last_checkpoint(save, text, tmp_path):
    """Weights that a finite gradient has thrown away: the training loss before it was fine."""
    whole_epochs = "--tokens-per-sample 500 --segment-length-std 0 --short-segment-probability 0".split()
    run("train", *lm_args(text, tmp_path, *whole_epochs, "--max-epoch", 1))
    before = files(tmp_path)
    more = ["--lr", 1e38, "--reset-optimizer", "--reset-lr-scheduler", "--max-epoch", 3]
    with pytest.raises(UserError, match=r"the validation loss is (nan|inf) in epoch 2: lower --lr"):
        run("train", *lm_args(text, tmp_path, *whole_epochs, *more, *save))
    assert files(tmp_path) == before


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--amp"]])
def test_gradients_that_are_not_finite_are_one_sentence(flags, text, tmp_path, monkeypatch, no_loss_scale):
    train_step = BpttLanguageModelingTask.train_step

    def poison(task, sample, model, criterion, optimizer, update_num, *args, **kwargs):
        result = train_step(task, sample, model, criterion, optimizer, update_num, *args, **kwargs)
        if update_num == 3:
            next(model.parameters()).grad.fill_(math.nan)
        return result

    monkeypatch.setattr(BpttLanguageModelingTask, "train_step", poison)
    with pytest.raises(UserError, match="^gradients are Nan/Inf at update 4: lower --lr"):
        run("train", *lm_args(text, tmp_path, "--max-epoch", 1, "--save-interval-updates", 2, *flags))
    assert (tmp_path / "checkpoint_1_2.pt").exists()


@pytest.mark.slow
def test_a_loss_that_overflows_is_left_to_the_loss_scale(text, tmp_path, monkeypatch, enabled_loss_scale):
    """--amp, enabled as on a GPU, tries the update again with a smaller scale and the hidden state that it had."""
    more = [*NO_DROPOUT, *"--amp --max-epoch 1 --update-freq 2 --seed 3".split()]
    expected = run("train", *lm_args(text, tmp_path / "smooth", *more)).log["train_inner"]
    train_step, skipped = BpttLanguageModelingTask.train_step, []

    def overflow(task, sample, model, criterion, optimizer, update_num, *args, **kwargs):
        if update_num == 3 and not skipped:
            skipped.append(optimizer.scaler.get_scale())
            criterion.register_forward_hook(lambda _, __, output: (output[0] * math.inf, *output[1:]))
        elif skipped:
            criterion._forward_hooks.clear()
        return train_step(task, sample, model, criterion, optimizer, update_num, *args, **kwargs)

    monkeypatch.setattr(BpttLanguageModelingTask, "train_step", overflow)
    log = run("train", *lm_args(text, tmp_path / "overflow", *more)).log["train_inner"]
    assert skipped and float(log[-1]["loss_scale"]) == skipped[0] / 2
    assert [line["num_updates"] for line in log] == [line["num_updates"] for line in expected]
    paths = [tmp_path / name / "checkpoint_last.pt" for name in ("smooth", "overflow")]
    assert_same_parameters(*paths, rtol=0, atol=0)


@pytest.mark.slow
def test_an_update_given_up_in_an_epochs_first_segment_leaves_no_state(text, trained):
    """--fp16 goes on with the segment after it, whose hidden state is not that of the epoch before."""
    model, task = load_language_model(str(trained[0]), str(text))
    task.epoch, model.decoder.states = 2, {"train": "of the epoch before"}

    def overflow(model, sample):
        model.decoder.states["train"] = "of the segment"
        return torch.tensor(math.inf), 1, {}

    optimizer = SimpleNamespace(scaler=object(), backward=lambda loss: None)
    sample = {"net_input": {"first_segment": True}, "segment": 0, "lr_scale": 1, "last_segment": False, "nsentences": 4}
    task.train_step(sample, model, overflow, optimizer, 9)
    assert model.decoder.states == {}


def test_nt_asgd_that_would_be_sgd_to_its_end_is_refused(text, tmp_path):
    with pytest.raises(UserError, match="needs --task bptt_language_modeling, not LanguageModelingTask"):
        run("train", *lm_args(text, tmp_path, "--task", "language_modeling", "--tokens-per-sample", 20))
    with pytest.raises(UserError, match="which --disable-validation leaves out: give --averaging-epoch"):
        run("train", *lm_args(text, tmp_path, "--disable-validation"))
    with pytest.raises(UserError, match="--stop-when-nonmonotone ends by validation, which --disable-validation"):
        more = "--disable-validation --averaging-epoch 0 --stop-when-nonmonotone".split()
        run("train", *lm_args(text, tmp_path, *more))
    with pytest.raises(UserError, match="which --validate-interval 10 with --max-epoch 9 leaves out: give --averaging"):
        run("train", *lm_args(text, tmp_path, "--validate-interval", 10, "--max-epoch", 9))
    with pytest.raises(UserError, match="which --validate-after-updates 10 leaves out: give --averaging-epoch"):
        run("train", *lm_args(text, tmp_path, "--validate-after-updates", 10, "--max-update", 9))
    with pytest.raises(UserError, match="does not go with --use-bmuf"):
        run("train", *lm_args(text, tmp_path, "--use-bmuf"))


@pytest.mark.parametrize("flag", ["--memory-efficient-bf16", "--memory-efficient-fp16"])
def test_an_optimizer_that_needs_float32_weights_is_refused(text, tmp_path, flag):
    with pytest.raises(UserError, match="do not go with --optimizer nt_asgd, .*: use --bf16 or --fp16"):
        run("train", *lm_args(text, tmp_path, flag))


def test_no_columns(text, tmp_path):
    with pytest.raises(UserError, match="needs --batch-size"):
        run("train", *lm_args(text, tmp_path, "--batch-size", 0))


def test_checkpoints_chosen_by_a_number_that_is_not_reported(text, tmp_path):
    with pytest.raises(UserError, match="^--best-checkpoint-metric bpc needs --report-bpc: add it$"):
        run("train", *lm_args(text, tmp_path, "--best-checkpoint-metric", "bpc"))


def test_a_model_without_a_hidden_state_is_refused(text, tmp_path):
    more = "--task bptt_language_modeling --arch lstm_lm --decoder-layers 1 --batch-size 4 --cpu".split()
    with pytest.raises(UserError, match="needs a model that keeps its hidden state, .* not LSTMLanguageModel"):
        run("train", text, "--save-dir", tmp_path, "--user-dir", USER_DIR, *more)


def test_an_epoch_without_its_end_is_refused(text, tmp_path):
    with pytest.raises(UserError, match="^--skip-remainder-batch is not allowed"):
        run("train", *lm_args(text, tmp_path, "--skip-remainder-batch", "--update-freq", 4))


@pytest.mark.parametrize("smoothing", [[], ["--label-smoothing", 0.1]])
def test_stock_label_smoothing_is_refused(smoothing, text, tmp_path):
    more = ["--criterion", "label_smoothed_cross_entropy", *smoothing]
    args = [arg for arg in lm_args(text, tmp_path, *more)]
    with pytest.raises(UserError, match="gives mass to symbols that cannot be predicted"):
        run("train", *args)


def test_dataset_that_is_missing(text, trained):
    with pytest.raises(FileNotFoundError, match="Dataset not found: test9"):
        evaluate(text, trained[0], "--gen-subset", "test9")


@pytest.mark.slow
def test_the_training_text_is_evaluated_whole(text, trained):
    """7 columns leave a remainder, which only training drops."""
    assert evaluate(text, trained[0], "--gen-subset", "train", "--batch-size", 7)[1] == 1800
    args = [text, "--user-dir", USER_DIR, "--task", "bptt_language_modeling", "--path", trained[0], "--cpu"]
    args += "--valid-subset train --batch-size 7 --num-workers 0 --log-format json".split()
    assert float(run("validate", *args).log["train"][-1]["train_wpb"]) == 1800
