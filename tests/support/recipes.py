"""The scripts of examples/, run as a user does, and what the tests of them share."""

import importlib.util
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import fork_server
import pytest
from fairseq.data import Dictionary, data_utils

from mixtape_plugin.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
# How a train.log begins, up to the command; a regular expression.
HEADER = r"train\.sh: commit \S+, on .+ \(threads: \d+\), command "
TINY_TRANSFORMER = """
    --encoder-layers 1 --encoder-embed-dim 16 --encoder-ffn-embed-dim 16 --decoder-layers 1 --decoder-embed-dim 16
    --decoder-ffn-embed-dim 16 --max-epoch 6 --max-tokens 1000 --gate-dim 4 --warmup-updates 10 --log-interval 1
""".split()
TINY_LSTM = "--embed-dim 8 --hidden-sizes 12,8 --gate-dim 4 --num-components 3 --log-interval 1 --num-workers 0 --cpu"
TINY_LSTM = TINY_LSTM.split()


def tools():
    """The environment variables with which scripts find the tools of the Python that runs the tests."""
    venv = fork_server.environment()
    path = os.pathsep.join([str(venv / "bin"), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "MIXTAPE_VENV": str(venv)}


def start(example, script, *args, **environment):
    # None of Slurm's variables
    inherited = {name: value for name, value in tools().items() if not name.startswith("SLURM_")}
    return subprocess.Popen(
        ["bash", str(ROOT / "examples" / example / script), *map(str, args)],
        env={**inherited, **{name: str(value) for name, value in environment.items()}},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        start_new_session=True,
    )


def run(*args, **environment):
    process = start(*args, **environment)
    out, err = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def output(*args, **environment):
    """What a run prints which must succeed."""
    done = run(*args, **environment)
    assert done.returncode == 0, done.stderr + done.stdout[-2000:]
    return done.stdout


def mistake(*args, **environment):
    """The one sentence that a run ends with which must fail."""
    done = run(*args, **environment)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


def stub(folder, **scripts):
    """A folder for MIXTAPE_VENV whose commands are shell scripts, `_` in their names standing for `-`."""
    (folder / "bin").mkdir(parents=True)
    for name, script in scripts.items():
        path = folder / "bin" / name.replace("_", "-")
        path.write_text(f"#!/usr/bin/env bash\n{script}\n")
        path.chmod(0o755)
    return folder


FAKE_TORCH = """
import os

class cuda:
    device_count = staticmethod(lambda: int(os.environ.get("GPUs", 8)))
    is_available = staticmethod(lambda: cuda.device_count() > 0)
    get_device_capability = staticmethod(lambda: (int(os.environ.get("CAPABILITY", 9)), 0))

class version:
    hip = None
"""
PRINT = 'printf "%s\\n" "$@"'  # of a stub that prints its arguments, one a line


def machine(folder, **scripts):
    """A stub whose python sees $GPUs GPUs, 8 unless told, of compute capability $CAPABILITY, 9 unless told."""
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "torch.py").write_text(FAKE_TORCH)
    python = f'PYTHONPATH="{folder}/torch" exec "{sys.executable}" "$@"'
    return stub(folder, python=python, **scripts)


def load_script(name):
    """scripts/NAME.py or examples/lib/NAME.py as a module."""
    (folder,) = [folder for folder in (ROOT / "scripts", ROOT / "examples" / "lib") if (folder / f"{name}.py").exists()]
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))  # as for a script that is run
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # by which other processes find it
    spec.loader.exec_module(module)
    return module


def check_refusal(main, options):
    """A script's main() refuses these options, in one sentence that has them."""
    with pytest.raises(UserError) as stop:
        main(options)
    sentence = str(stop.value)
    assert " ".join(options) in sentence and "\n" not in sentence


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def binarized_files(folder):
    """The same but for the logs, which hold the folder's name."""
    return {name: data for name, data in files(folder).items() if Path(name).name not in ("preprocess.log", "settings")}


def decoded(folder, split):
    """The lines of a binarized text, as lists of symbols with </s>."""
    dictionary = Dictionary.load(str(folder / "dict.txt"))
    lines = data_utils.load_indexed_dataset(str(folder / split), dictionary)
    return [[dictionary[token] for token in lines[i]] for i in range(len(lines))]


def lines(path):
    return path.read_text(encoding="utf-8").split("\n")[:-1]


def write_archive(path, content, *more):
    """A tar, gzipped but where its name ends in .tar, of files by name -> content, and further members."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w" if path.suffix == ".tar" else "w:gz") as archive:
        for name, data in content.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        for member in more:
            archive.addfile(member)
    return path
