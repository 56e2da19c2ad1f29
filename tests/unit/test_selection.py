"""What of a command --where and --without find, and what its flags are."""

import pytest

from mixtape_plugin.analysis.results import value_of_flag
from mixtape_plugin.analysis.selection import has


@pytest.mark.parametrize(
    "text, found",
    [("--lr 4", ["4", "4 --fp16"]), ("--lr 0.4", ["0.4"]), ("--lr", ["4", "40", "4.5", "0.4", "0.45", "4 --fp16"])],
)
def test_a_number_of_a_command_is_a_whole_one(text, found):
    rates = ["4", "40", "4.5", "0.4", "0.45", "4 --fp16"]
    assert [rate for rate in rates if has(f"train.sh softmax --lr {rate}", text)] == found


def test_a_name_of_a_command_may_go_on():
    assert has("train.sh moc --save checkpoints/ptb.moc --lr 4", "checkpoints/ptb.")
    assert has("train.sh moc --save checkpoints/multi30k.lc.moc", "multi30k.lc")


def test_flags_are_what_a_shell_makes_of_them():
    """The log has each word quoted for a shell."""
    command = r"train.sh softmax --hidden-sizes 416\,140 --adam-betas '(0.9, 0.98)' --lr=4 --small"
    assert has(command, "--hidden-sizes 416,140")
    values = {"hidden-sizes": "416,140", "adam-betas": "(0.9, 0.98)", "lr": "4", "small": "yes", "seed": None}
    assert {name: value_of_flag(command, name) for name in values} == values
    assert value_of_flag(f"{command} --lr 8", "lr") == "8"
