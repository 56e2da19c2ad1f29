"""What is written appears whole or not at all."""

import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from recipes import ROOT

from mixtape_plugin.errors import UserError
from mixtape_plugin.files import (
    check_outputs,
    check_place,
    make_folder,
    read_csv,
    write_csv,
    write_text,
    write_whole,
    writing,
)


def test_of_two_that_write_one_file_at_once_none_takes_the_others_part(tmp_path, monkeypatch):
    path = tmp_path / "table.csv"

    def slowly(part):
        part.write_text("the first")
        monkeypatch.setattr(os, "getpid", lambda: -1)  # another process begins and ends meanwhile
        write_text(path, "the other")
        assert path.read_text() == "the other"

    write_whole(path, slowly)
    assert path.read_text() == "the first" and os.listdir(tmp_path) == ["table.csv"]


def test_what_fails_halfway_leaves_what_was_there(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("before")

    def half(part):
        part.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match=f"^--out {path} cannot be written: No space left on device$"):
        with writing("--out", path):
            write_whole(path, half)
    assert path.read_text() == "before" and os.listdir(tmp_path) == ["table.csv"]


def test_a_folder_is_no_place_for_a_file(tmp_path):
    with pytest.raises(UserError, match=f"^--csv {tmp_path} cannot be written: it is a folder$"):
        check_place("--csv", tmp_path)
    check_place("--csv", tmp_path / "new.csv")
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_replaced_keeps_its_other_names(tmp_path):
    """It is another file that takes its name, so that who reads it meanwhile reads the old one to its end."""
    (tmp_path / "file").write_text("old")
    os.link(tmp_path / "file", tmp_path / "link")
    write_text(tmp_path / "file", "new")
    assert ((tmp_path / "file").read_text(), (tmp_path / "link").read_text()) == ("new", "old")


def test_a_folder_in_the_place_of_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    make_folder(tmp_path / "new" / "deep")
    assert (tmp_path / "new" / "deep").is_dir()
    with pytest.raises(UserError, match=f"^--out {tmp_path}/file cannot be a folder: File exists$"):
        make_folder(tmp_path / "file")
    if os.path.isdir("/proc/self"):  # which nobody can write into
        with pytest.raises(UserError, match="^--out /proc/self cannot be written: "):
            make_folder(Path("/proc/self"))


def test_what_a_killed_process_left_is_removed(tmp_path):
    path = tmp_path / "best.one.pt"
    killed = "import os, sys; from mixtape_plugin.files import write_whole; " + (
        "write_whole(sys.argv[1], lambda part: (part.write_text('half'), os.kill(os.getpid(), 9)))"
    )
    for other in path, tmp_path / "best.pt":
        subprocess.run([sys.executable, "-c", killed, str(other)], cwd=ROOT)
    left = {name.rpartition("-")[0]: name for name in os.listdir(tmp_path)}
    assert len(left) == 2
    kept = [f".best.one.{platform.node()}-{process}.part.pt" for process in (1, 10**30)]  # 1 lives
    for name in kept:
        (tmp_path / name).write_text("half")
    write_text(path, "whole")
    assert set(os.listdir(tmp_path)) == {"best.one.pt", *kept, left[f".best.{platform.node()}"]}


@pytest.mark.parametrize("mode", ["w", "a"])
@pytest.mark.parametrize("unbuffered", ["1", ""])
def test_where_a_process_prints_is_written_to_in_order(mode, unbuffered, tmp_path):
    """/dev/stdout, where it is a file; what is there stays."""
    code = "from mixtape_plugin.files import write_text; print(1); write_text('/dev/stdout', 'a table\\n'); print(2)"
    with open(tmp_path / "out", mode) as file:
        environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=file, env=environment, check=True)
    assert (tmp_path / "out").read_text() == "1\na table\n2\n" and os.listdir(tmp_path) == ["out"]


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no /dev/shm here")
def test_shared_memory_has_files():
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = os.path.join(folder, "a.csv")
        write_text(path, "whole")
        assert os.listdir(folder) == ["a.csv"]
        with pytest.raises(UserError, match="^--plot .* is not allowed, as --out names it"):
            check_outputs({"--out": path, "--plot": path})


def test_a_device_may_be_named_twice():
    for device in "/dev/null", "/proc/self/fd/1":  # which a shell's >(command) may be called
        check_outputs({"--csv": device, "--markdown": device}, [device])
    write_text("/dev/null", "gone")


def test_a_row_with_more_cells_than_names_is_damaged(tmp_path):
    (tmp_path / "a.csv").write_text("a,b\n1,2\n1,2,3\n")
    with pytest.raises(UserError, match="a.csv, row 2 is damaged: it has other cells than the first line has names"):
        read_csv(tmp_path / "a.csv", ["a"], "is no table")


def test_what_was_written_is_read_however_long_a_cell(tmp_path):
    rows = [{"name": "a", "curve": " ".join(f"{n}:12.345678" for n in range(20_000))}]
    write_csv(tmp_path / "a.csv", ["name", "curve"], rows)
    assert read_csv(tmp_path / "a.csv", ["name"], "") == rows


def test_a_name_that_is_not_utf_8_is_written_with_its_bytes(tmp_path):
    name = os.fsdecode(b"caf\xe9")
    write_csv(tmp_path / "a.csv", ["name"], [{"name": name}])
    assert read_csv(tmp_path / "a.csv", ["name"], "") == [{"name": "caf\\udce9"}]
    write_text(tmp_path / "a.md", name)
    assert (tmp_path / "a.md").read_text() == "caf\\udce9"
