"""Groups of trainings that differ in their seed alone: which they are, and their names."""

import math
from statistics import stdev

import pytest
from training_logs import row

from mixtape_plugin.analysis.groups import Sample, find_baseline, groups, leave_out_repeats
from mixtape_plugin.errors import UserError


def test_groups_of_the_same_flags_in_another_order_have_names_of_their_own():
    commands = ["train.sh softmax --lr 20 --lr 10", "train.sh softmax --lr 10 --lr 20"]
    names = [group.name for group in groups([row(command, 1) for command in commands])]
    assert names == [f"softmax: {command}" for command in commands]


def test_groups_are_of_equal_commands_but_for_seed_and_save():
    commands = [
        "examples/ptb/train.sh softmax --seed 1",
        "examples/ptb/train.sh softmax --lr 20 --seed 1",
        "examples/ptb/train.sh softmax --save a\\ b --seed 2",
        "examples/ptb/train.sh softmax",
        "examples/ptb/train.sh softmax --seed=3 --lr 20",
        "unknown",
        "unknown",
    ]
    rows = [row(command, n, f"run{n}") for n, command in enumerate(commands)]
    found = groups(rows)
    assert [[r["seed"] for r in group.rows] for group in found] == [["0", "2", "3"], ["1", "4"], ["5"], ["6"]]
    assert [group.name for group in found[:2]] == ["softmax: no further flags", "softmax: --lr 20"]
    assert [group.name for group in found[2:]] == ["softmax: run5", "softmax: run6"]


def test_a_diverged_training_is_not_in_the_mean():
    rows = [row("train.sh softmax", n, **{"valid ppl": ppl}) for n, ppl in enumerate([math.nan, math.inf, 80.0, 82.0])]
    assert groups(rows)[0].sample("valid ppl") == Sample(81.0, pytest.approx(math.sqrt(2)), 2)


def test_a_folder_given_to_fairseq_makes_no_group():
    commands = ["train.sh softmax --save-dir=a --seed 1", "train.sh softmax --save-dir b --seed 2"]
    assert len(groups([row(command, n) for n, command in enumerate(commands)])) == 1


def test_a_seed_counts_once():
    """The first one, but that one which ended goes before; runs for their speed alone all count."""
    values = [
        (1, 80.0, "yes"),
        (2, 79.0, "no"),
        (1, 80.5, "yes"),
        (2, 81.0, "yes"),
        (None, 82.0, "no"),
        (None, 83.0, "yes"),
    ]
    rows = [row("train.sh softmax", seed, f"run{n}", ended=ended) for n, (seed, _, ended) in enumerate(values)]
    for line, (seed, ppl, _) in zip(rows, values):
        line.update({"valid ppl": ppl, "seed": seed})
    found = groups(rows)
    assert leave_out_repeats(found) == [("run2", "run0"), ("run1", "run3")]
    assert [line["folder"] for line in found[0].rows] == ["run0", "run3", "run4", "run5"]
    assert found[0].sample("valid ppl") == Sample(81.5, pytest.approx(stdev([80, 81, 82, 83])), 4)
    speeds = groups([row("train.sh softmax", 1, f"run{n}", **{"tokens/s": 100 + n}) for n in range(3)])
    assert leave_out_repeats(speeds) == [] and len(speeds[0].rows) == 3


def test_the_order_of_flags_makes_no_group_unless_one_is_given_twice():
    commands = [
        "train.sh softmax --lr 20 --small --dropout 0.1",
        "train.sh softmax --dropout=.1 --lr 2e1 --small",
        "train.sh softmax --lr 20 --lr 10",
        "train.sh softmax --lr 10 --lr 20",
    ]
    found = groups([row(command, n) for n, command in enumerate(commands)])
    assert [[r["seed"] for r in group.rows] for group in found] == [["0", "1"], ["2"], ["3"]]


def test_one_command_of_other_parameters_or_precision_makes_groups():
    """A recipe's defaults change from commit to commit, and its precision with the processor."""
    rows = [row("train.sh softmax", seed) for seed in range(1, 5)]
    for line, parameters, precision in zip(rows, (1000, 1000, 1000, 2000), ("bfloat16", "float32", "bfloat16", None)):
        line.update(parameters=parameters, precision=precision)
    found = {group.name: [line["seed"] for line in group.rows] for group in groups(rows)}
    assert found == {
        "softmax, 1,000 parameters, bfloat16": ["1", "3"],
        "softmax, 1,000 parameters, float32": ["2"],
        "softmax, 2,000 parameters, unknown": ["4"],
    }


def test_flags_tell_groups_apart_and_layers_name_them():
    rows = [
        row("train.sh softmax", 1),
        row("train.sh mixtape", 1, layer="mixtape-4"),
        row("train.sh mos", 1, layer="mos-5"),
    ]
    found = groups(rows)
    assert [group.name for group in found] == ["softmax", "mixtape-4", "mos-5"]
    assert find_baseline(found, "mixtape") is find_baseline(found, "mixtape-4") is found[1]
    with pytest.raises(UserError) as error:
        find_baseline(found, "moc")
    assert str(error.value) == "--baseline moc names 0 groups of trainings: it must be one of softmax, mixtape-4, mos-5"
    with pytest.raises(UserError, match="--baseline softmax names 2 groups"):
        find_baseline(groups([*rows, row("train.sh softmax --lr 1", 1)]), "softmax")
    plif = groups([row("train.sh plif", 1, layer="plif"), row("train.sh plif-frozen", 1, layer="plif-frozen")])
    assert find_baseline(plif, "plif") is plif[0] and find_baseline(plif, "plif-frozen") is plif[1]


def test_a_command_with_an_open_quote_is_read_by_blanks():
    found = groups([row("train.sh softmax 'a --seed 1", 1), row("train.sh softmax 'a --seed 2", 2)])
    assert [len(group.rows) for group in found] == [2]


def test_groups_of_a_layer_are_named_by_what_they_do_not_share():
    commands = [
        "train.sh mixtape --max-update 10 --betas '(0.9, 0.98)' --small",
        "train.sh mixtape --max-update 10 --frequent-ratio 1 --betas '(0.9, 0.98)' --small",
        "train.sh mixtape --max-update 10 --betas '(0.9, 0.99)' --small --sizes 3 4",
    ]
    names = [group.name for group in groups([row(command, 1, layer="mixtape-4") for command in commands])]
    assert names == [
        "mixtape-4: --betas (0.9, 0.98)",
        "mixtape-4: --frequent-ratio 1 --betas (0.9, 0.98)",
        "mixtape-4: --betas (0.9, 0.99) --sizes 3 4",
    ]
    assert [group.name for group in groups([row(command, 1) for command in commands[:2]])] == [
        "softmax: no further flags",
        "softmax: --frequent-ratio 1",
    ]
