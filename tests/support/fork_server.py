"""fairseq's commands and some scripts in forks of one process that has imported fairseq: each saves 4 seconds so.

:func:`environment` gives a copy of the tests' virtual environment, links but for fairseq's commands and `python`. Such
a command, or `python` with one of the scripts below, hands what it was called with to the server, whose fork runs it:
in the caller's folder, with the caller's environment and its stdin, stdout and stderr. Some variables are read only
when Python starts: where they are others than the server's the command itself is run, as `python` is for all else.
"""

import atexit
import functools
import importlib
import json
import logging
import os
import runpy
import select
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import tempfile
from pathlib import Path

FAIRSEQ = tuple(f"fairseq-{name}" for name in "preprocess train generate interactive validate eval-lm".split())
COMMANDS = ("python", *FAIRSEQ)
ROOT = Path(__file__).resolve().parents[2]
# Those of the scripts which import fairseq or torch, and which the recipes call
SCRIPTS = [
    str(ROOT / "scripts" / f"{name}.py") for name in ("average_checkpoints", "cache_pointer", "dynamic_evaluation")
]
SCRIPTS.append(str(ROOT / "examples" / "lib" / "plan_training.py"))
READ_AT_START = ("PYTHON", "OMP_", "MKL_")
CLIENT = """#!{python} -SE
import os, sys

at_start = {{name: value for name, value in os.environ.items() if name.startswith({read_at_start})}}
if at_start != {at_start} or {scripts} and sys.argv[1:2] not in {scripts}:
    os.execv({command!r}, [{command!r}, *sys.argv[1:]])

import json, socket

with socket.socket(socket.AF_UNIX) as connection:
    connection.connect({address!r})
    request = json.dumps([sys.argv, os.getcwd(), dict(os.environ)]) + "\\n"
    socket.send_fds(connection, [request.encode()], [0, 1, 2])
    status = connection.recv(1)
sys.exit(status[0] if status else 1)
"""


@functools.lru_cache(maxsize=None)
def environment():
    """The folder of the environment; its server ends with this process, and removes it.

    Without a virtual environment, or what Linux and Python 3.9 have for it, the one there is, with fairseq's commands.
    """
    real = Path(sys.prefix)
    if not (hasattr(os, "pidfd_open") and (real / "pyvenv.cfg").exists()):
        return real
    root = Path(tempfile.mkdtemp())
    for path in [*real.iterdir(), *(real / "bin").iterdir()]:
        link = root / path.relative_to(real)
        if path == real / "bin":
            link.mkdir()
        elif path.name not in COMMANDS:
            link.symlink_to(path)
    environ = {**os.environ, "PYTHONUTF8": "1"}  # which the recipes set
    environ.pop("PYTHONPATH", None)  # which a test sets
    at_start = {name: value for name, value in environ.items() if name.startswith(READ_AT_START)}
    for name in COMMANDS:
        client = CLIENT.format(
            python=real / "bin" / "python",
            read_at_start=READ_AT_START,
            at_start=at_start,
            scripts=[[script] for script in SCRIPTS] if name == "python" else None,
            command=str(real / "bin" / name),
            address=str(root / "socket"),
        )
        (root / "bin" / name).write_text(client)
        (root / "bin" / name).chmod(0o755)
    server = subprocess.Popen([sys.executable, __file__, root], env=environ, stdout=subprocess.PIPE)
    assert server.stdout.readline() == b"ready\n"
    return root


class Command(socketserver.BaseRequestHandler):
    """One command, in a fork of the server that ends with it; a caller who is killed takes the command along."""

    def handle(self):
        request, files, _, _ = socket.recv_fds(self.request, 2**20, 3)
        while not request.endswith(b"\n"):
            request += self.request.recv(2**20)
        command = os.fork()
        if not command:
            run(*json.loads(request), files)
        ended = os.pidfd_open(command)
        alive = ended not in select.select([ended, self.request], [], [])[0]
        if alive:
            os.kill(command, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(command, 0)[1])
        if not alive:
            self.request.sendall(bytes([code if code >= 0 else 128 - code]))


def run(argv, folder, environ, files):
    """Ends this process as the command would."""
    for target, file in enumerate(files):
        os.dup2(file, target)
    sys.stdin, sys.stdout = open(0), open(1, "w")
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace")
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = argv
    status = 0
    try:
        name = Path(argv[0]).name
        if name == "python":
            del sys.argv[0]
            sys.path.insert(0, os.path.dirname(sys.argv[0]))
            runpy.run_path(sys.argv[0], run_name="__main__")
        else:
            importlib.import_module("fairseq_cli." + name.split("-", 1)[1].replace("-", "_")).cli_main()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(status)


class Server(socketserver.ForkingMixIn, socketserver.UnixStreamServer):
    max_children = 100

    def __init__(self, folder):
        super().__init__(str(folder / "socket"), Command)
        self.folder, self.parent = folder, os.getppid()

    def service_actions(self):
        """Twice a second: end when the tests have."""
        super().service_actions()
        if os.getppid() != self.parent:
            shutil.rmtree(self.folder)
            sys.exit()


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, which a command's Python hasn't
    for module in ("trainer", "sequence_generator", "dataclass.initialize"):  # what takes the time
        importlib.import_module(f"fairseq.{module}")
    logging.getLogger().handlers.clear()  # a command sets up its own
    with Server(Path(sys.argv[1])) as server:
        print("ready", flush=True)
        server.serve_forever()
