"""train.sh and quickstart.sh, stopped by a signal to them alone: the training that they began stops, too."""

import os
import signal
import subprocess
import time

import pytest
from recipes import ROOT, machine, start, stub, tools
from test_quickstart import write_parallel

# says that it is there, and would train on
TRAINING = 'mkdir -p "{folder}"; echo $$ >"{folder}/pid.$$"; echo "epoch 001"; exec sleep 600'


def pids(folder, count):
    """Of the trainings, once there are so many and each has said so."""
    for _ in range(600):
        found = [path.read_text().strip() for path in folder.glob("pid.*")]
        if len(found) == count and all(found):
            return [int(pid) for pid in found]
        time.sleep(0.1)
    raise AssertionError(f"{len(found)} trainings have begun, not {count}")


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:  # one that ended and that nobody has asked about is there, too
        return file.read().rpartition(")")[2].split()[0] != "Z"


def check_end(process, trainings, sent):
    process.send_signal(sent)
    process.communicate(timeout=60)
    assert process.returncode == {signal.SIGTERM: 143, signal.SIGINT: 130}[sent]
    for _ in range(100):
        if not any(map(is_alive, trainings)):
            return
        time.sleep(0.1)
    raise AssertionError("a training goes on")


@pytest.fixture(autouse=True)
def interruptible():
    """Where the tests themselves run in the background they ignore interrupts, and so would what they start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_train_sh(sent, tmp_path):
    venv = machine(tmp_path / "venv", fairseq_train=TRAINING.format(folder=tmp_path / "pids"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dict.txt").write_text("a 1\n")
    args = ["softmax", "--data", tmp_path / "data", "--save", tmp_path / "save", "--cpu"]
    process = start("ptb", "train.sh", *args, MIXTAPE_VENV=venv)
    check_end(process, pids(tmp_path / "pids", 1), sent)
    assert (tmp_path / "save" / "train.log").read_text().endswith("epoch 001\n")


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_quickstart(sent, tmp_path):
    venv = stub(tmp_path / "venv", fairseq_train=TRAINING.format(folder=tmp_path / "pids"))
    environment = {**tools(), "PATH": f"{venv}/bin{os.pathsep}{tools()['PATH']}"}
    data = write_parallel(tmp_path / "data")
    process = subprocess.Popen(
        [ROOT / "scripts" / "quickstart.sh", "--no-setup", "--data", data, "--out", tmp_path / "out"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    check_end(process, pids(tmp_path / "pids", 2), sent)
