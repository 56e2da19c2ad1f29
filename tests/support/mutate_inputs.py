"""Damages one file after the other and runs a command of fairseq on it, each in a forked child of this process.

    python mutate_inputs.py FOLDER SEED CASES

FOLDER holds what test_damaged_inputs.py has trained. Prints a line of JSON for each case: what was damaged and how, and
how the command ended: "done", "sentence" or "traceback", and its text.
"""

import json
import os
import random
import signal
import sys
import traceback
from pathlib import Path

import torch._dynamo  # noqa: F401, the first optimizer would import it in each child
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq_cli import generate, train

from mixtape_plugin.errors import sentence_for_user

TRANSLATION = ["dict.x.txt", "dict.y.txt", "train.x-y.x.idx", "train.x-y.x.bin", "train.x-y.y.idx", "train.x-y.y.bin"]
TEST = ["dict.x.txt", "dict.y.txt", "test.x-y.x.idx", "test.x-y.x.bin"]
TEXT = ["dict.txt", "train.idx", "train.bin"]


def commands(folder):
    """Name -> function that runs it, and the files that it reads, a checkpoint as often as all data together."""
    arguments = json.loads((folder / "arguments.json").read_text())
    parsers = {"train": options.get_training_parser, "generate": options.get_generation_parser}
    configs = {}
    for name, args in arguments.items():
        parser = parsers["generate" if name == "generate" else "train"]()
        parsed = options.parse_args_and_arch(parser, args)
        configs[name] = convert_namespace_to_omegaconf(parsed)
    data = {"translation": TRANSLATION, "generate": TEST, "language model": TEXT}
    for name, config in configs.items():
        main = generate.main if name == "generate" else train.main
        kind = "text" if name == "language model" else "translation"
        files = [folder / kind / file for file in data[name]]
        yield name, (lambda main=main, config=config: main(config)), files + [folder / f"{kind}.pt"] * len(files)


def mutate(rng, content, is_text):
    """(what was done, the damaged content)"""
    damaged = bytearray(content)
    place = rng.randrange(len(damaged))
    kind = rng.choice(["flipped", "zeroed", "cut", "header"] + ["line", "lines added", "lines removed"] * is_text)
    if kind == "flipped":
        for place in rng.sample(range(len(damaged)), min(len(damaged), rng.choice([1, 4, 64]))):
            damaged[place] ^= rng.randrange(1, 256)
    elif kind == "header":
        damaged[rng.randrange(min(40, len(damaged)))] ^= rng.randrange(1, 256)
    elif kind == "zeroed":
        length = min(len(damaged) - place, rng.choice([1, 8, 500]))
        damaged[place : place + length] = bytes(length)
    elif kind == "cut":
        del damaged[place:]
    else:
        lines = content.splitlines(keepends=True)
        place = rng.randrange(len(lines))
        if kind == "line":
            lines[place] = rng.choice([b"\n", b"word\n", b"word count\n", b"a b c\n", b"\xff 1\n", lines[place - 1]])
        elif kind == "lines added":
            lines += [b"new%d 0\n" % number for number in range(rng.choice([1, 8]))]
        else:
            del lines[place : place + rng.choice([1, 8])]
        damaged = b"".join(lines)
    return kind, bytes(damaged)


def run_in_child(command):
    """How it ended, and its sentence or traceback."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(120)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1), os.dup2(null, 2)
        try:
            command()
            ended = ["done", ""]
        except BaseException as error:
            sentence = sentence_for_user(error)
            ended = ["sentence", sentence] if sentence else ["traceback", traceback.format_exc()]
        os.write(writer, json.dumps(ended).encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        written = pipe.read()
    _, status = os.waitpid(child, 0)
    return json.loads(written) if written else ["traceback", f"the process ended with status {status}"]


def main():
    folder, seed, cases = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    rng = random.Random(seed)
    known = list(commands(folder))
    for name, command, _ in known:
        print(json.dumps({"command": name, "file": None, "ended": run_in_child(command)}), flush=True)
    for _ in range(cases):
        name, command, files = rng.choice(known)
        file = rng.choice(files)
        whole = file.read_bytes()
        kind, damaged = mutate(rng, whole, file.suffix == ".txt")
        file.write_bytes(damaged)
        ended = run_in_child(command)
        file.write_bytes(whole)
        print(json.dumps({"command": name, "file": str(file), "kind": kind, "ended": ended}), flush=True)


if __name__ == "__main__":
    main()
