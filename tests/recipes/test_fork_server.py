"""The forks in which the tests run fairseq's commands (support/fork_server.py) do as the commands do."""

import os
import subprocess
import sys

from conftest import console_script
from recipes import ROOT, files, tools

FORK, REAL = "fairseq-preprocess", console_script("preprocess")


def preprocess(command, folder, *args):
    """A running fairseq-preprocess, in a folder with a text."""
    folder.mkdir()
    (folder / "train.a").write_text("x y\nz\n")
    command = [command, "--only-source", "-s", "a", "--trainpref", "train", "--destdir", "out", *args]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8")
    return subprocess.Popen(command, cwd=folder, env=tools(), **pipes)


def test_same_files(tmp_path):
    for command, name in (FORK, "fork"), (REAL, "real"):
        process = preprocess(command, tmp_path / name)
        out, err = process.communicate()
        assert process.returncode == 0, err
        assert "[a] Dictionary: 8 types" in out + err
    fork, real = (files(tmp_path / name) for name in ("fork", "real"))
    assert fork.keys() == real.keys()
    assert all(fork[name] == real[name] for name in fork if not name.endswith(".log"))


def test_same_mistake(tmp_path):
    runs = [preprocess(command, tmp_path / name, "--workers", "two") for command, name in ((FORK, "f"), (REAL, "r"))]
    (_, fork), (_, real) = [run.communicate() for run in runs]
    assert [run.returncode for run in runs] == [2, 2]
    assert fork.splitlines()[-1] == real.splitlines()[-1]
    assert "--workers" in real


def test_same_mistake_in_a_script(tmp_path):
    """Its one sentence; that scripts do their work in a fork, test_multi30k_example.py sees."""
    script = str(ROOT / "scripts" / "average_checkpoints.py")
    done = [
        subprocess.run(
            [python, script, "--last", "3", "nowhere", "--output", "average.pt"],
            **dict(cwd=tmp_path, env=tools(), capture_output=True, encoding="utf-8"),
        )
        for python in ("python", sys.executable)
    ]
    assert [run.returncode for run in done] == [1, 1]
    assert done[0].stderr == done[1].stderr and "nowhere has 0" in done[0].stderr


def test_a_caller_who_is_killed_takes_the_command_along(tmp_path):
    os.mkfifo(tmp_path / "for.a")
    process = preprocess(FORK, tmp_path / "folder", "--trainpref", tmp_path / "for")
    with open(tmp_path / "for.a", "w"):  # waits until the command reads
        process.kill()
        process.communicate(timeout=60)  # until the command, too, has closed its output
    assert process.returncode < 0
