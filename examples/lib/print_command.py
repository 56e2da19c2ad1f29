#!/usr/bin/env python3
"""Print a command so that it can be read, changed and pasted into a shell, for train.sh --print:

print_command.py fairseq-train data-bin/ptb --lr 1
"""

import shlex
import signal
import sys
from typing import Sequence

WIDTH = 110


def format_command(command: Sequence[str]) -> str:
    """The command in lines that can be pasted into a shell; a flag stays with its values."""
    lines = [shlex.quote(command[0])]
    for argument in command[1:]:
        quoted = shlex.quote(argument)
        if argument.startswith("--"):
            lines.append(quoted)
        else:
            lines[-1] += f" {quoted}"
    joined = lines[:1]
    for line in lines[1:]:
        if len(joined[-1]) + len(line) < WIDTH:
            joined[-1] += f" {line}"
        else:
            joined.append(f"  {line}")
    return " \\\n".join(joined)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # train.sh --print | head
    print(format_command(sys.argv[1:]))
