"""Files of real data, in the folder that MIXTAPE_DATA names."""

import gzip
import itertools
import os
from pathlib import Path

import pytest


def has_real_data(folder):
    return "MIXTAPE_DATA" in os.environ and (Path(os.environ["MIXTAPE_DATA"]) / folder).is_dir()


def real_path(name):
    """The path of FOLDER/FILE, or of a folder; without the folder the test that asks is skipped."""
    folder = name.split("/")[0]
    if not has_real_data(folder):
        pytest.skip(f"MIXTAPE_DATA names no folder of real data with {folder}/ in it")
    return Path(os.environ["MIXTAPE_DATA"]) / name


def real_lines(name, count=None):
    """The first lines of the text FOLDER/FILE, which lies there as FILE.gz."""
    with gzip.open(real_path(f"{name}.gz"), "rt", encoding="utf-8", newline="\n") as file:
        return [line.rstrip("\n") for line in itertools.islice(file, count)]
