"""What all scripts share: the plugin of their checkout, and errors in one sentence."""

import os
import signal
import subprocess
import sys

import pytest
from recipes import ROOT, load_script

from mixtape_plugin.errors import UserError
from mixtape_plugin.files import write_csv

SCRIPTS = [path for path in sorted((ROOT / "scripts").glob("*.py")) if "mixtape_plugin" in path.read_text()]
MISTAKES = {  # options after which a script ends before it computes anything, and the end of its sentence
    "score": (
        "--hypotheses nowhere --references nowhere --source-lang en --target-lang de",
        "nowhere cannot be read: ",
    ),
    "make_corpus": ("--out out --train 0", "--train 0 is not allowed: at least 1"),
    "bottleneck": ("--steps 1", "--steps 1 is not allowed: at least 10"),
    "average_checkpoints": ("--last 0 . --output out.pt", "--last 0 is not allowed: 1 or more"),
}


@pytest.mark.parametrize("path", [path for path in SCRIPTS if path.name != "start.py"], ids=lambda path: path.stem)
def test_every_script_starts_alike(path):
    code = path.read_text()
    assert "\nimport start\n" in code and code.endswith("\n    start.run(main)\n")
    assert "sys.path" not in code and "noqa: E402" not in code


def test_a_file_that_cannot_be_written_is_named_in_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # which run() sets
    start, path = load_script("start"), tmp_path / "folder.csv"
    path.mkdir()
    with pytest.raises(UserError, match=f"^{path}: Is a directory$"):
        start.run(lambda: write_csv(path, ["a"], [{"a": 1}]))
    assert os.listdir(tmp_path) == ["folder.csv"]

    def no_file():
        raise ConnectionResetError(104, "Connection reset by peer")

    with pytest.raises(ConnectionResetError):
        start.run(no_file)


@pytest.mark.slow
@pytest.mark.parametrize("lines", [1, 1000])
def test_a_reader_that_has_seen_enough(lines, tmp_path):
    """`| head`: of more than a pipe holds, and of what is printed as the script ends."""
    script = f"import start\nstart.run(lambda: print('a line\\n' * 100 * {lines}))"
    command = [sys.executable, "-c", script]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}/scripts:{ROOT}"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env) as process:
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait() == 128 + signal.SIGPIPE


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_from_anywhere_beside_another_installed_copy(name, tmp_path):
    (tmp_path / "mixtape_plugin").mkdir()
    (tmp_path / "mixtape_plugin" / "__init__.py").write_text("raise ImportError('the wrong copy')")
    options, sentence = MISTAKES[name]
    command = [sys.executable, ROOT / "scripts" / f"{name}.py", *options.split()]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    env.pop("MIXTAPE_TRACEBACK", None)
    result = subprocess.run(list(map(str, command)), cwd=tmp_path, env=env, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr.startswith(f"error: {sentence}") and result.stderr.count("\n") == 1
    assert os.listdir(tmp_path) == ["mixtape_plugin"]


@pytest.mark.slow
def test_with_a_closed_standard_output():
    command = [sys.executable, ROOT / "scripts" / "make_corpus.py", "--help"]
    result = subprocess.run(["bash", "-c", '"$@" >&-', "bash", *command], capture_output=True, text=True)
    assert result.returncode == 0 and result.stderr.startswith("usage: ")  # argparse turns to standard error


@pytest.mark.slow
def test_help_on_a_terminal_that_lacks_the_letters():
    env = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    command = [sys.executable, ROOT / "scripts" / "dynamic_evaluation.py", "--help"]
    done = subprocess.run(list(map(str, command)), env=env, capture_output=True)
    assert done.returncode == 0 and b"\\u03b7" in done.stdout, done.stderr
