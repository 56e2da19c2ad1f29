"""Text out of archives (.tar, .tar.gz), which are data: nothing is unpacked under a name that one of them gives."""

import contextlib
import gzip
import hashlib
import re
import tarfile
import zlib
from pathlib import PurePosixPath

# What some tool downstream would take for the end of a line, and others would not.
LINE_ENDS = re.compile("[\v\f\x1c\x1d\x1e\x85\u2028\u2029]")


def read_all(file, function=len):
    for block in iter(lambda: file.read(1 << 20), b""):
        function(block)


@contextlib.contextmanager
def archive_members(path):
    """Yields an iterator of (name, open file) over a tar or tar.gz; what is left of it at the end is read too.

    One with a link, or a member outside its folder, is not the original: raises ValueError, as of one that is damaged.
    """

    def members(tar, file):
        for member in tar:
            name = member.name
            if name.startswith("/") or ".." in PurePosixPath(name).parts:
                raise ValueError(f"{path} is refused: its member {name!r} lies outside its folder")
            if not (member.isfile() or member.isdir()):
                raise ValueError(f"{path} is refused: its member {name!r} is neither a file nor a folder")
            if member.isfile():
                yield name, tar.extractfile(member)
        read_all(file)  # to gzip's checksum, which comes after the tar's end

    try:
        with open(path, "rb") as file:
            compressed = file.read(2) == b"\x1f\x8b"
        # tarfile's own reading of a gzip stream would not look at its checksum.
        with (gzip.open if compressed else open)(path, "rb") as file, tarfile.open(fileobj=file, mode="r|") as tar:
            yield members(tar, file)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is damaged or incomplete: {error}") from None


def check_archive(path, names, md5=""):
    """Raises ValueError unless the archive can be read to its end, holds files of these names and has this MD5 sum."""
    if md5:
        digest = hashlib.md5()
        with open(path, "rb") as file:
            read_all(file, digest.update)
        if digest.hexdigest() != md5:
            raise ValueError(f"{path} is not the original: its MD5 sum is {digest.hexdigest()}, not {md5}")
    missing = set(names)
    with archive_members(path) as members:
        for path_inside, file in members:
            name = PurePosixPath(path_inside).name
            if name in missing:
                missing.remove(name)
                read_all(gzip.open(file, "rb") if name.endswith(".gz") else file)
    if missing:
        raise ValueError(f"{path} has no file {min(missing)}")


def member_lines(path, wanted):
    """The text lines (str) of the archive's file of that name: plain, .gz, or the segments of a .sgm."""
    with archive_members(path) as members:
        for name, file in members:
            if PurePosixPath(name).name != wanted:
                continue
            if name.endswith(".gz"):
                file = gzip.open(file, "rb")
            # Bytes that are no UTF-8 become U+FFFD, by which the cleaning knows them.
            lines = (line.rstrip(b"\n").decode("utf-8", "replace").replace("\r", "") for line in file)
            if name.endswith(".sgm"):
                # As sacrebleu reads it: one segment a line, entities left as they are.
                segments = (re.search(r"^\s*<seg[^>]*>(.*)</seg>", line) for line in lines)
                lines = (" ".join(found[1].split()) for found in segments if found)
            for line in lines:
                yield LINE_ENDS.sub(" ", line)
            return
    raise ValueError(f"{path} has no file {wanted}")
