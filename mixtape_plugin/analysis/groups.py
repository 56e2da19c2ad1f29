"""Groups of trainings that differ in their seed alone: which they are, their names, and means over their seeds."""

from __future__ import annotations

import re
import shlex
import statistics
from dataclasses import dataclass
from typing import Sequence

from mixtape_plugin.analysis.results import UNKNOWN, words_of
from mixtape_plugin.errors import UserError

BESIDE_THE_COMMAND = {"parameters": " parameters", "precision": ""}  # what tells groups apart, and its unit


@dataclass
class Sample:
    """Mean, sample standard deviation (n − 1; None where n < 2) and n of a column's values in a group."""

    mean: float
    std: float | None
    n: int


@dataclass
class Group:
    """Trainings of equal commands but for --seed and --save, of as many parameters and in one precision."""

    name: str
    layer: str
    command: str
    rows: list

    def sample(self, column: str) -> Sample | None:
        """None where no training has a finite number there."""
        values = numbers(self.rows, column)
        if not values:
            return None
        mean = values[0] if len(set(values)) == 1 else statistics.fmean(values)  # a count stays an int
        return Sample(mean, statistics.stdev(values) if len(values) > 1 else None, len(values))


def numbers(rows: Sequence[dict], column: str) -> list:
    """The finite values of a column."""
    values = [row.get(column) for row in rows]
    return [value for value in values if isinstance(value, (int, float)) and abs(value) < float("inf")]


def add_mean(rows: Sequence[dict], name: str, parts: Sequence[str], known: Sequence[str]) -> None:
    """Gives each training a further column, the mean of its values in others; None where it has not all of them.

    Raises UserError for fewer than two others, one without numbers, or a name that is one of the known columns.
    """
    if len(parts) < 2:
        raise UserError(f"--mean {shlex.join([name, *parts])} is not allowed: a name, and two columns or more")
    if name in known or any(name in row for row in rows):
        raise UserError(f"--mean {name!r} is a column already: choose another name")
    for part in parts:
        if not numbers(rows, part):
            raise UserError(f"--mean {name!r} cannot be of {part!r}: no training has a number there")
    for row in rows:
        values = [value for part in parts for value in numbers([row], part)]
        row[name] = statistics.fmean(values) if len(values) == len(parts) else None


def without_seed(command: str) -> list:
    """The words of a command of train.sh without --seed and --save."""
    words, skip = [], False
    for word in words_of(command):
        if not skip and not re.match(r"--(seed|save|save-dir)(=|$)", word):
            words.append(word)
        skip = not skip and word in ("--seed", "--save", "--save-dir")
    return words


def flags(command: str) -> list:
    """The flags of a command of train.sh, each with its values."""
    found = []
    for word in words_of(command)[2:]:
        if word.startswith("--") or not found:
            found.append(word.replace("=", " ", 1) if word.startswith("--") else word)
        else:
            found[-1] += f" {word}"
    return found


def plain_number(word: str) -> str:
    """A number as Python prints it, other words as they are."""
    try:
        return str(float(word))
    except ValueError:
        return word


def groups(rows: Sequence[dict]) -> list:
    """The trainings by command, in whatever order its flags are, .1 being 0.1; one whose command is unknown is a group
    of its own. What a recipe's defaults at two commits, or two processors, made of one command are two groups: networks
    with other numbers of parameters, and trainings in another precision."""
    found = {}
    for row in rows:
        key = command = row["folder"]
        if row["command"] != UNKNOWN:
            command = shlex.join(without_seed(row["command"]))
            # of a flag that is given twice the last counts: these stay in their order
            ordered = sorted(flags(command), key=lambda flag: flag.split(" ")[0])
            key = (*words_of(command)[:2], *(" ".join(map(plain_number, flag.split(" "))) for flag in ordered))
        layer = row["layer"] or row["training"]
        key = key, *(row.get(name) for name in BESIDE_THE_COMMAND)
        found.setdefault(key, Group(layer, layer, command, [])).rows.append(row)
    found = list(found.values())
    for group in found:
        if group.rows[0]["command"] == UNKNOWN:
            group.name = f"{group.layer}: {group.command}"  # the folder
            continue
        others = [other for other in found if other.layer == group.layer and other.rows[0]["command"] != UNKNOWN]
        if len({other.command for other in others}) > 1:  # tell them apart by the flags that not all of them have
            shared = set.intersection(*({*flags(other.command)} for other in others))
            own = [flag for flag in flags(group.command) if flag not in shared]
            group.name = f"{group.layer}: {' '.join(own) or 'no further flags'}"
    # a flag that is given twice, in two orders
    clashing = [group for group in found if any(o.name == group.name and o.command != group.command for o in found)]
    for group in clashing:
        group.name = f"{group.layer}: {group.command}"
    for name in {group.name for group in found}:
        alike = [group for group in found if group.name == name]
        for column, unit in BESIDE_THE_COMMAND.items():
            values = [group.rows[0].get(column) for group in alike]
            for group, value in zip(alike, values if len({*values}) > 1 else ()):
                value = f"{value:,}" if isinstance(value, int) else value or "unknown"
                group.name += f", {value}{unit}"
    return found


def leave_out_repeats(found: Sequence[Group]) -> list:
    """Takes out of each group the trainings of a seed that it has already, one that ended before one that did not: the
    same numbers once more, or nearly, are no further sample of what seeds do. Runs without a validation, of which the
    speed is all that counts, stay.

    Returns:
        for each that is left out its folder, and that of the training that stays.
    """
    repeats = []
    for group in found:
        kept = {}
        for row in sorted(group.rows, key=lambda row: row.get("ended") == "no"):
            own = row["seed"] is None or not numbers([row], "valid ppl")
            stays = kept.setdefault(id(row) if own else row["seed"], row)
            if stays is not row:
                repeats.append((row["folder"], stays["folder"]))
        group.rows = [row for row in group.rows if any(row is stays for stays in kept.values())]
    return repeats


def rename(found: Sequence[Group], names: Sequence[Sequence[str]]) -> None:
    """Calls groups by other names, pairs of the present one and the new.

    Raises UserError where no group has the former, or one has the latter already.
    """
    for old, new in names:
        matching = [group for group in found if group.name == old]
        if not matching:
            known = ", ".join(group.name for group in found)
            raise UserError(f"--name {old!r} is no group of trainings: it must be one of {known}")
        if new in (group.name for group in found):
            raise UserError(f"--name {old!r} {new!r} is not allowed: another group of trainings has this name")
        matching[0].name = new


def find_baseline(found: Sequence[Group], name: str) -> Group:
    """The one group of this layer (such as softmax, mixtape or mixtape-4); raises UserError for none or several."""
    matching = [group for group in found if name in (group.name, group.layer)]
    matching = matching or [group for group in found if name == group.layer.rsplit("-", 1)[0]]
    if len(matching) != 1:
        names = ", ".join(dict.fromkeys(group.name for group in found))
        raise UserError(f"--baseline {name} names {len(matching)} groups of trainings: it must be one of {names}")
    return matching[0]
