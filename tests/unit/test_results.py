"""What a training's folder tells: analysis.results on logs and scores made here, whole, resumed, cut off, damaged."""

import json
import math

import pytest
from training_logs import DONE, TIME, epoch, start, write_folder

from mixtape_plugin.analysis.results import collect, log_records, value_of_flag


def test_a_log_counts_by_its_best_validation_and_its_median_speeds(folder):
    """Not by its last validation, nor by means, which one slow epoch moves."""
    log = start() + epoch(1, 10, 80, wps=100, train_wall=400) + epoch(2, 20, 70.5, wps=1000, train_wall=50)
    log += epoch(3, 30, 75, wps=1300, train_wall=60) + DONE
    row, _ = collect(folder(train_log=log))
    assert row["valid ppl"] == 70.5 and row["curve"][30] == 75
    assert (row["tokens/s"], row["s an epoch"]) == (1000, 60)


def test_perplexity_in_training_is_of_the_epoch_of_the_best_validation(folder):
    """Also where the first validation gave no number."""
    log = start() + epoch(1, 10, "nan").replace("6.17", "99.0") + epoch(2, 20, 70).replace("6.17", "5.5")
    row, _ = collect(folder(train_log=log + epoch(3, 30, 75) + DONE))
    assert (row["valid ppl"], row["train ppl"]) == (70, 5.5)


def test_an_epoch_that_was_interrupted_is_not_counted(folder):
    begun = epoch(2, 20, 70).splitlines(keepends=True)[0]
    row, _ = collect(folder(train_log=start() + epoch(1, 10, 80) + begun))
    assert (row["epochs"], row["updates"]) == (1, 16)


def test_speed_of_a_log_without_its_inner_lines(folder):
    """Of a training with --log-interval above an epoch's updates."""
    log = start() + "".join(epoch(n, 9 * n, 50).split("\n", 1)[1] for n in (1, 2))
    assert collect(folder(train_log=log))[0]["tokens/s"] == 1125.2


def test_settings_of_a_layer_are_told_apart(tmp_path):
    """Frozen slopes are another model: its seeds are no seeds of PLIF."""
    for layer, name in (
        ("plif", "plif"),
        ("plif-frozen", "plif-frozen"),
        ("softmax", "softmax"),
        ("mixtape", "mixtape-4"),
    ):
        path = write_folder(tmp_path / layer, train_log=start(layer) + epoch(1, 274, 362.3) + DONE)
        assert collect(path)[0]["layer"] == name


def test_resumed_training(folder):
    """One log of two starts, the first killed in the middle of a line; the third, too, with nothing after it."""
    killed = f"{TIME}valid | epoch 002 | valid on 'valid' subset | loss 9 | nll_loss 8.5 | ppl 1"
    first = start(parameters="1") + epoch(1, 274, 200.5) + killed
    second = (
        start(seed=9, bf16=False).replace("3be862a, on EPYC (threads: 1)", "48f452b+, on Xeon (threads: 2)")
        + epoch(2, 548, 63.25, wall=130)
        + DONE
    )
    path = folder(train_log=first + second + killed)
    row, damaged = collect(path)
    assert damaged == [] and (row["seed"], row["parameters"], row["updates"]) == ("9", 5_472_793, 548)
    assert (row["commit"], row["valid ppl"], row["wall s"]) == ("3be862a, 48f452b+", 63.25, 60 + 130)
    assert (row["precision"], row["hardware"]) == ("float32", "EPYC (threads: 1); Xeon (threads: 2)")
    assert row["ended"] == "no"  # something was begun after "done training"
    assert row["curve"] == {274: 200.5, 548: 63.25} and row["command"].endswith("mixtape --seed 9")
    earlier = folder("earlier", train_log=start().replace(" on EPYC (threads: 1),", ""))  # logs had no hardware once
    row, _ = collect(earlier)
    assert (row["commit"], row["hardware"], row["command"].split()[0]) == (
        "3be862a",
        "unknown",
        "examples/multi30k/train.sh",
    )


def test_a_start_that_trained_nothing_changes_nothing(folder):
    """A mistyped command in a finished training's folder, and one that is refused because the layer is another."""
    log = start() + epoch(1, 274, 200.5) + DONE
    expected, _ = collect(folder("before", train_log=log))
    mistyped = start().splitlines()[0].replace("3be862a", "48f452b") + " --patiens 3\nfairseq-train: error: no such\n"
    refused = start("softmax", seed=9, parameters="1").replace("EPYC", "Xeon") + "RuntimeError: does not fit\n"
    row, damaged = collect(folder("after", train_log=log + mistyped + refused))
    assert damaged == [] and {**row, "folder": "", "training": ""} == {**expected, "folder": "", "training": ""}
    row, _ = collect(folder("never", train_log=mistyped + refused))  # none is better: what was tried is told
    assert (row["layer"], row["updates"], row["hardware"]) == ("softmax", None, "EPYC (threads: 1); Xeon (threads: 1)")


@pytest.mark.parametrize(
    "said", ["No existing checkpoint found a/checkpoint_last.pt", "Loaded checkpoint a/best.pt (epoch 6 @ 0 updates)"]
)
def test_a_training_begun_anew_is_another(folder, said):
    """Its checkpoints were removed, and its log was not: nothing of what went before is of this network."""
    said = f"{TIME}fairseq.trainer | {said}\n"
    before = start("softmax", seed=9) + said + epoch(1, 274, 50) + epoch(2, 548, 40) + DONE
    anew = start() + said + epoch(1, 274, 200.5)
    resumed = start() + f"{TIME}fairseq.trainer | Loaded checkpoint a/checkpoint_last.pt (epoch 2 @ 274 updates)\n"
    refused = start("softmax") + "RuntimeError: does not fit\n"
    expected, _ = collect(folder("alone", train_log=anew + resumed + epoch(2, 548, 150) + DONE))
    row, damaged = collect(folder("after", train_log=before + anew + refused + resumed + epoch(2, 548, 150) + DONE))
    assert damaged == [] and {**row, "folder": "", "training": ""} == {**expected, "folder": "", "training": ""}
    assert (row["layer"], row["valid ppl"], row["wall s"]) == ("mixtape-4", 150.0, 120)


def test_a_log_of_fairseq_alone_may_be_of_several_starts(folder):
    """`fairseq-train | tee -a`, without train.sh's line: the clock begins anew with each configuration."""
    first = start().split("\n", 1)[1] + epoch(1, 274, 200.5, wall=100)
    row, _ = collect(folder(train_log=first + start(seed=9).split("\n", 1)[1] + epoch(2, 548, 63.25, wall=130) + DONE))
    assert (row["wall s"], row["seed"], row["ended"], row["commit"]) == (230, "9", "yes", "unknown")


@pytest.mark.parametrize("flag, precision", [("fp16", "float16"), ("amp", "float16 autocast"), ("", "float32")])
def test_precision(folder, flag, precision):
    log = start(bf16=False).replace("'bf16': False", "'bf16': False, 'amp': False")
    row, _ = collect(folder(train_log=log.replace(f"'{flag}': False", f"'{flag}': True") + epoch(1, 274, 200.5)))
    assert row["precision"] == precision


def test_json_log(folder):
    values = {"epoch": 3, "valid_loss": "8.2", "valid_ppl": "300.72", "valid_num_updates": "682"}
    inner = {
        "epoch": 3,
        "update": 2.5,
        "loss": "4.1",
        "ppl": "17.1",
        "wps": "977.2",
        "num_updates": "600",
        "wall": "55",
    }
    train = {"epoch": 3, "train_loss": "4.2", "train_ppl": "18", "train_num_updates": "682", "train_wall": "61"}
    lines = {"train_inner": inner, "valid": values, "train": train}
    log = start() + "".join(f"{TIME}{name} | {json.dumps(line)}\n" for name, line in lines.items()) + DONE
    path = folder(train_log=log)
    row, _ = collect(path)
    assert (row["updates"], row["epochs"], row["valid ppl"], row["tokens/s"]) == (682, 3, 300.72, 977.2)
    assert row["wall s"] == 61 and row["curve"] == {682: 300.72}


def test_infinite_and_tiny_numbers_and_half_a_line():
    lines = epoch(1, 274, "inf").replace("lr=5e-05", "lr=5e-05, clip=0") + epoch(2, 300, "nan")
    assert list(log_records(f"{TIME}valid | epoch 002 | num_updates 300 | ppl 1{TIME}fairseq.trainer | begin\n")) == []
    inner, valid, _, _, second, _ = [values for _, values in log_records(lines)]
    assert valid["ppl"] == float("inf") and second["ppl"] != second["ppl"]
    assert (inner["lr"], inner["clip"], inner["epoch"]) == (5e-5, 0, 1)


@pytest.mark.parametrize("order", [("nan", "300.5", "310.0"), ("300.5", "310.0", "nan")])
def test_the_best_validation_is_a_number_where_one_is(folder, order):
    log = start() + "".join(epoch(number, 100 * number, ppl) for number, ppl in enumerate(order, 1)) + DONE
    assert collect(folder("some", train_log=log))[0]["valid ppl"] == 300.5
    diverged = start() + epoch(1, 100, "nan") + DONE
    assert math.isnan(collect(folder("none", train_log=diverged))[0]["valid ppl"]), "it was run"


@pytest.mark.parametrize(
    "scores", ["", "{}", "[]", "3", "null", "[3]", '[{"metric": "x"}]', '[{"metric": "BLEU 13a", "score": "x"}]']
)
def test_scores_that_are_none(folder, scores):
    row, damaged = collect(folder(train_log=start(), score_json=scores))
    assert row["BLEU 13a"] == "unreadable" and damaged == [f"{row['folder']}/score.json is no list of scores"]


def test_the_last_line_of_fairseqs_own_validation(folder):
    line = (
        "| INFO | test | valid on 'test' subset | loss 8.801 | nll_loss 8.271 | ppl 308.82 | wps 0 | wpb 552 | bsz 40\n"
    )
    row, damaged = collect(folder(train_log=start(), test__perplexity_txt="2026-11-28 00:25:59 " + line))
    assert row["test ppl"] == 308.82 and not damaged


def test_train_perplexity_is_of_the_best_epoch(folder):
    log = start() + epoch(1, 10, 80) + epoch(2, 20, 70).replace("6.17", "5.5") + epoch(3, 30, 75)
    validated = "\n".join(epoch(4, 40, 60).splitlines()[:2]) + "\n"  # and killed before its own line was written
    row, _ = collect(folder(train_log=log + validated))
    assert row["valid ppl"] == 60 and row["train ppl"] == 5.5


def test_train_perplexity_of_shards_is_of_the_last_updates(folder):
    """4,000 of them, as One Billion Word's is quoted, whatever an epoch is."""
    log = start(task="bptt_language_modeling").replace("Namespace(", "Namespace(data='a/shard00:a/shard01', ")
    inner = "2026-01-02 03:04:05 | INFO | train_inner | epoch 001: 5 / 9 loss=1, ppl={}, num_updates={}\n"
    log += (
        inner.format(1000, 1000)
        + inner.format(20, 1200)
        + inner.format(80, 5000)
        + epoch(1, 5004, 60).split("\n", 1)[1]
    )
    row, _ = collect(folder(train_log=log))
    assert row["train ppl"] == pytest.approx(40)


def test_train_bits_of_characters(folder):
    path = folder(
        train_log=start(task="bptt_language_modeling") + epoch(1, 5, 3).replace("6.17", "4"),
        test_txt="test: 5,000 characters, 1.4427 bits a character, perplexity 2.72\n",
    )
    row, _ = collect(path)
    assert row["train bits/character"] == 2


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"columns": 3}', '{"columns": {"rank": "x"}}'])
def test_damaged_analyses(content, folder):
    path = folder(train_log=start() + epoch(1, 5, 3))
    (path / "rank.json").write_text(content)
    row, damaged = collect(path)
    assert "rank" not in row and damaged == [f"{path}/rank.json holds no figures"]


def test_a_flag_has_the_value_that_is_given_last():
    for command in "train.sh x --lr=1 --lr=2", "train.sh x --lr 1 --lr 2", "train.sh x --lr=1 --lr 2":
        assert value_of_flag(command, "lr") == "2"
