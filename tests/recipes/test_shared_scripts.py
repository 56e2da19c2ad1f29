"""examples/lib, what all recipes share: logs, exit codes, commits, folders, what is left of an earlier evaluation."""

import os
import shutil
import subprocess
import sys

import pytest
from recipes import ROOT, machine, mistake, output, run, stub, tools, write_archive

ANALYSES = ("rank.json", "predictions.json", "similarity.json")


@pytest.fixture
def train(tmp_path):
    """A function that calls train.sh of a recipe with a fairseq-train of its own."""
    (tmp_path / "dict.txt").write_text("the 1\n")
    args = ["ptb", "train.sh", "softmax", "--data", tmp_path, "--save", tmp_path / "save", "--cpu"]

    def call(fairseq_train, times=1):
        venv = machine(tmp_path / "venv", fairseq_train=fairseq_train)
        return [run(*args, MIXTAPE_VENV=venv) for _ in range(times)]

    return call


def test_a_rerun_goes_on_with_the_log(train, tmp_path):
    printed = [done.stdout for done in train('echo "trained $RANDOM"', times=2)]
    assert all("trained" in text for text in printed)
    assert (tmp_path / "save" / "train.log").read_text() == "".join(printed)


def test_a_training_that_fails_is_no_success(train, tmp_path):
    (done,) = train("echo no memory >&2; exit 3")
    assert done.returncode == 3
    assert (tmp_path / "save" / "train.log").read_text().endswith("no memory\n")


def test_a_commit_whose_files_were_changed_has_a_plus(tmp_path):
    shutil.copytree(ROOT / "examples" / "lib", tmp_path / "examples" / "lib")

    def shell(code):
        git = 'git() { command git -c user.name=a -c user.email=a@b "$@"; }'
        command = ["bash", "-c", f"root={tmp_path}; cd $root; {git}; {code}"]
        return subprocess.run(command, capture_output=True, text=True, check=True, env=tools()).stdout.strip()

    commit = 'source "$root/examples/lib/training.sh"; commit'
    assert shell(commit) == "unknown"
    head = shell("git init -q; git add .; git commit -qm x; git rev-parse --short HEAD")
    assert shell(commit) == head
    (tmp_path / "examples" / "lib" / "jobs.sh").write_text("# changed\n")
    assert shell(commit) == f"{head}+"


def test_the_dictionary_of_a_binarized_text_comes_last(tmp_path):
    """By it the next steps know that all of it is there."""
    made = 'for folder; do :; done; mkdir "$folder"; touch "$folder"/{dict.txt,train.bin}'
    full = 'case $1 in *train.bin) exit 1 ;; esac; exec /bin/mv "$@"'
    venv, out = stub(tmp_path / "venv", fairseq_preprocess=made, mv=full), tmp_path / "out"
    out.mkdir()

    def binarize():
        code = f'set -euo pipefail; root={ROOT}; source "$root/examples/lib/recipes.sh"; workers=1 text={out}'
        return subprocess.run(
            ["bash", "-c", f"{code}; binarize {out} dict.txt"], env={**os.environ, "MIXTAPE_VENV": str(venv)}
        )

    assert binarize().returncode == 1 and not (out / "dict.txt").exists()
    (venv / "bin" / "mv").unlink()
    assert binarize().returncode == 0 and sorted(os.listdir(out)) == ["dict.txt", "train.bin"]


@pytest.mark.parametrize("example", ["ptb", "wikitext2", "text8", "switchboard", "multi30k"])
def test_a_relative_folder_is_the_same_from_elsewhere(example, tmp_path):
    (tmp_path / "one").mkdir()
    command = ["bash", ROOT / "examples" / example / "prepare.sh", "--from", "one", "--out", tmp_path / "out"]
    assert subprocess.run(command, cwd=tmp_path, env=tools(), capture_output=True).returncode == 1  # it holds no text
    assert (tmp_path / "out" / "text" / "settings").read_text().startswith(f"from {tmp_path}/one, ")


def test_analyses_of_another_average_go(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "raw.test.de").write_text("a\n")
    for name in ANALYSES:
        (tmp_path / name).write_text("")
    venv = stub(tmp_path / "venv", python="", fairseq_validate="echo no memory; exit 1")
    assert mistake("wmt14_en_de", "evaluate.sh", tmp_path, "--data", tmp_path, MIXTAPE_VENV=venv).endswith("no memory")
    assert not [name for name in ANALYSES if (tmp_path / name).exists()]


def test_what_a_killed_run_left_is_of_another_average(tmp_path):
    """Killed between its average and all that it makes of it; what belongs to the average stays."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "raw.test.de").write_text("a\n")
    of_average = ["valid.hyp", "valid-score.json", *ANALYSES]

    def evaluate(content, fails=True):
        script = (
            f'case "$1" in */average_checkpoints.py) echo {content} >{tmp_path}/average.pt; exit {int(fails)};; esac'
        )
        python = f'{script}; exec "{sys.executable}" "$@"'
        folder = tmp_path / f"{content}.{fails}"
        venv = stub(folder, python=python, fairseq_validate="echo no memory; exit 1") if not folder.exists() else folder
        assert run("wmt14_en_de", "evaluate.sh", tmp_path, "--data", tmp_path, MIXTAPE_VENV=venv).returncode == 1
        return [name for name in of_average if (tmp_path / name).exists()]

    evaluate("one", fails=False)
    for name in of_average:
        (tmp_path / name).write_text("")
    assert evaluate("one", fails=False) == of_average
    assert evaluate("two", fails=True) == of_average
    assert evaluate("two", fails=False) == []


def test_analyses_of_an_earlier_checkpoint_go(tmp_path):
    (tmp_path / "dict.txt").write_text("the 1\n")
    for name in ("checkpoint_best.pt", *ANALYSES):
        (tmp_path / name).write_text("")
    for name in ANALYSES:
        os.utime(tmp_path / name, (1, 1))
    said = 'echo "Evaluated 1,234 tokens in"; echo "Loss (base 2): 2.0000, Perplexity: 4.00"'
    venv = stub(tmp_path / "venv", fairseq_eval_lm=said)
    output("ptb", "evaluate.sh", tmp_path, "--data", tmp_path, MIXTAPE_VENV=venv)
    assert not [name for name in ANALYSES if (tmp_path / name).exists()]


@pytest.fixture
def text(tmp_path):
    """A folder of raw texts that exist already, up to 60 merges."""
    folder = tmp_path / "out" / "text"
    folder.mkdir(parents=True)
    (folder / "settings").write_text(f"from {tmp_path}, target de, merges 60, subword-nmt\n")
    return folder


def write_raw(text, split, size):
    for lang in ("en", "de"):
        (text / f"raw.{split}.{lang}").write_text("a\n" * size)


def test_a_validation_text_that_is_not_utf_8_is_refused(text, tmp_path):
    """In an archive that lies in the folder itself."""
    write_raw(text, "train", 1)
    segments = b'<refset><doc>\n<seg id="1"> caf\xe9 </seg>\n</doc></refset>\n'
    dev = {f"dev/newstest2013-{kind}.{lang}.sgm": segments for kind, lang in (("src", "en"), ("ref", "de"))}
    write_archive(tmp_path / "dev.tgz", dev)
    args = ["--from", tmp_path, "--out", tmp_path / "out", "--merges", 60]
    assert "dev.tgz, line 1 is not UTF-8 text" in mistake("wmt14_en_de", "prepare.sh", *args)
    assert not list(text.glob("raw.valid*"))


def test_each_text_has_its_own_number_of_lines(text, tmp_path):
    for split, size in (("train", 7), ("valid", 3000), ("test", 3003)):
        write_raw(text, split, size)
    venv = stub(tmp_path / "venv", python="exit 1", fairseq_preprocess="")
    args = ["--from", tmp_path, "--out", tmp_path / "out", "--merges", 60]
    said = run("wmt14_en_de", "prepare.sh", *args, MIXTAPE_VENV=venv).stderr
    assert [line for line in said.splitlines() if "not the original" in line] == [
        f"prepare.sh: not the original: {text}/raw.train.en has 7 lines, not 4548885"
    ]
