"""Files: text that is read line by line, CSV tables, and whatever is written appears whole or not at all."""

from __future__ import annotations

import contextlib
import csv
import glob
import io
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Callable, Iterable, Iterator, Sequence

from mixtape_plugin.errors import UserError


def read_lines(path: str | Path) -> list[str]:
    """The lines of a UTF-8 file with their ends, without a mark of the byte order; only \\n is an end, for BLEU counts
    lines.

    Raises:
        UserError: it is missing, empty or, in the line named, no UTF-8.
    """
    lines = []
    try:
        with open(path, "rb") as file:
            for line in file:
                lines.append(line.decode("utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}, line {len(lines) + 1} is not UTF-8 text: {error.reason}") from None
    if not lines:
        raise UserError(f"{path} is empty")
    lines[0] = lines[0].lstrip("\ufeff")  # which spreadsheets put there
    return lines


def is_device(path: str | Path) -> bool:
    """Whether it is a name such as /dev/stdout, which may lead to a file; /dev/shm has files of its own."""
    place = os.path.abspath(path)
    return place.startswith(("/dev/", "/proc/")) and not place.startswith("/dev/shm/")


def check_outputs(outputs: dict, inputs: Iterable[str | Path | None] = ()) -> None:
    """Raises UserError where an option would write over a file that is read, or over another output.

    Args:
        outputs: option -> path, or None where it is not given.
        inputs: what is read; None counts for nothing here, too.
    """
    taken = {os.path.realpath(path): f"{path} is read, too" for path in inputs if path is not None}
    for option, path in outputs.items():
        if path is None or is_device(path):
            continue
        place = os.path.realpath(path)
        if place in taken:
            raise UserError(f"{option} {path} is not allowed, as {taken[place]}: choose another name")
        taken[place] = f"{option} names it"


@contextlib.contextmanager
def writing(option: str, path: str | Path) -> Iterator[None]:
    """Inside, where a file cannot be written, UserError says which, and which option names it."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{option} {path} cannot be written: {error.strerror or error}") from None


def write_outputs(*outputs: tuple) -> None:
    """Of options, each with its path, None where it is not given, and what writes to that path: those that have one."""
    for option, path, write in outputs:
        if path is not None:
            with writing(option, path):
                write(path)


def make_folder(path: Path) -> None:
    """Makes --out before what takes long; raises UserError where it cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {path} cannot be a folder: {error.strerror}") from None
    with writing("--out", path), tempfile.TemporaryFile(dir=path):
        pass


def check_place(option: str, path: str | Path) -> None:
    """Raises UserError where :func:`write_whole` could not write to a path, before what takes long."""
    place = os.path.realpath(path)
    if os.path.isdir(place):
        raise UserError(f"{option} {path} cannot be written: it is a folder")
    if not is_device(path) and (os.path.isfile(place) or not os.path.exists(place)):
        with writing(option, path), tempfile.TemporaryFile(dir=os.path.dirname(place)):
            pass


def write_whole(path: str | Path, write: Callable[[Path], None]) -> None:
    """Calls ``write`` with a temporary path beside ``path``, of the same ending, and moves the result into place.

    The temporary path is of this process alone: of two that write one file at once, the last one's is what stays. What
    processes left that were killed on this machine is removed. A link stays one, and its target is replaced. What is
    neither file nor folder, such as a pipe, is written to.

    Raises:
        OSError: that cannot be; its ``filename`` is ``path``.
    """
    place = Path(os.path.realpath(path))
    begin, end = f".{place.stem}.{platform.node()}-", f".part{Path(path).suffix}"
    part = place.parent / f"{begin}{os.getpid()}{end}"
    try:
        if is_device(path) or os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
            write_to_device(path, write)
            return
        remove_parts_of_the_dead(place.parent, begin, end)
        write(part)
        os.replace(part, place)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        with contextlib.suppress(OSError):  # moved, or never made
            part.unlink()


def write_to_device(path: str | Path, write: Callable[[Path], None]) -> None:
    """Writes to what has no beginning, such as a pipe, or to where this process prints, after what it has printed:
    opened anew, the file behind /dev/stdout would begin anew, too."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "whole" + Path(path).suffix)
        write(made)
        sys.stdout.flush()
        target = os.stat(path)
        printing = next((number for number in (1, 2) if os.path.samestat(target, os.fstat(number))), None)
        with open(path if printing is None else os.dup(printing), "wb") as device:
            device.write(made.read_bytes())


def remove_parts_of_the_dead(folder: Path, begin: str, end: str) -> None:
    """Removes files whose names have the number of a process between ``begin`` and ``end``, which is gone."""
    for part in folder.glob(f"{glob.escape(begin)}*{glob.escape(end)}"):
        process = part.name[len(begin) : -len(end)]
        if process.isdecimal() and not process_lives(int(process)):
            with contextlib.suppress(OSError):  # gone, or somebody else's
                part.unlink()


def process_lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # it is somebody else's; no process has such a number
        pass
    return True


def write_text(path: str | Path, text: str) -> None:
    """UTF-8 text, whole or not at all; raises OSError as :func:`write_whole` does.

    What UTF-8 has not, the bytes of a file's name in another encoding, is written as backslashes and digits.
    """
    write_whole(path, lambda part: part.write_text(text, encoding="utf-8", errors="backslashreplace"))


def write_csv(path: str | Path, columns: Sequence[str], rows: Iterable[dict]) -> None:
    """A line for the names of the columns and one for each row, which is a dictionary."""

    def write(part):
        with open(part, "w", newline="", encoding="utf-8", errors="backslashreplace") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)

    write_whole(path, write)


def read_csv(path: str | Path, columns: Iterable[str], otherwise: str) -> list[dict]:
    """The rows below the line of names, as dictionaries of text.

    Raises:
        UserError: the file cannot be read, is no UTF-8 or no CSV file; it has no row or lacks one of the columns, of
            which ``otherwise`` says what to do; a name stands twice; a row has other cells than the first line.
    """
    text = "".join(read_lines(path))
    csv.field_size_limit(sys.maxsize)  # the curve of a training with many validations is longer than Python's limit
    try:
        reader = csv.DictReader(io.StringIO(text, newline=""))
        rows = list(reader)
    except csv.Error as error:
        raise UserError(f"{path} is no CSV file: {error}") from None
    if not rows or not {*columns} <= {*rows[0]}:
        raise UserError(f"{path} {otherwise}")
    twice = [name for name in reader.fieldnames if reader.fieldnames.count(name) > 1]
    if twice:
        raise UserError(f"{path} has two columns called {twice[0]!r}")
    for number, row in enumerate(rows, 1):
        if None in row or None in row.values():  # more cells than the first line has, or fewer
            raise UserError(f"{path}, row {number} is damaged: it has other cells than the first line has names")
    return rows
