"""The README's fairseq commands, as they stand there, on a text made here: each does what the next one needs."""

import random
import re
import shlex

import pytest
from conftest import USER_DIR, run
from recipes import ROOT

BRIEFLY = {"train": "--cpu --num-workers 0 --max-update 1", "generate": "--cpu --max-len-b 5", "eval-lm": "--cpu"}


def commands_of_the_readme():
    """The blocks that begin with fairseq-preprocess; of each the commands, split into words."""
    blocks = re.findall(
        r"^```\n(fairseq-preprocess .*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    return [[shlex.split(line) for line in block.replace("\\\n", " ").splitlines()] for block in blocks]


def write_lines(path, seed):
    """60 lines of 100 words, frequent and rare ones."""
    words, generator = [f"w{n}" for n in range(100)], random.Random(seed)
    weights = [1 / (n + 1) for n in range(100)]
    path.write_text("".join(" ".join(generator.choices(words, weights, k=8)) + "\n" for _ in range(60)))


@pytest.mark.slow
@pytest.mark.parametrize("block, names", [(0, ("en", "de")), (1, ("",))], ids=["translation", "language model"])
def test_the_readmes_commands_run(block, names, tmp_path, monkeypatch):
    blocks = commands_of_the_readme()
    assert len(blocks) == 2
    for seed, split in enumerate(("train", "valid", "test")):
        for name in names:
            write_lines(tmp_path / f"{split}.{name}".rstrip("."), seed)
    monkeypatch.chdir(tmp_path)
    ran = []
    for command, *args in blocks[block]:
        name = command.split("-", 1)[1]
        args = [USER_DIR if arg == "mixtape_plugin" else arg for arg in args]
        ran.append((name, run(name.replace("-", "_"), *args, *BRIEFLY.get(name, "").split())))
    assert [name for name, _ in ran] == ["preprocess", "train", "eval-lm" if block else "generate"]
    scored = ran[-1][1].stdout
    assert re.search(r"Perplexity: \d" if block else r"(?m)^H-59\t", scored)
