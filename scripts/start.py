"""How every script of this folder that uses the plugin starts: on the plugin beside it, its errors in one sentence.

    import start
    …
    if __name__ == "__main__":
        start.run(main)

Imported before the plugin, as sorting imports has it anyway, it lets `python scripts/NAME.py` find the mixtape_plugin
of this checkout: nothing needs to be installed, and a copy that is installed from elsewhere is not taken for it.
"""

import errno
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Callable

SCRIPTS = Path(__file__).resolve().parent

sys.path.insert(0, str(SCRIPTS.parent))
if Path(sys.argv[0]).resolve().parent == SCRIPTS:  # else a test imports a script
    # Before fairseq is imported, which greets, and sets a level that floods the terminal.
    logging.basicConfig(level=logging.WARNING)
    if sys.stdout is not None:  # none where it is closed; a terminal may have no η, and a table is worth more than that
        sys.stdout.reconfigure(errors="backslashreplace")


def run(main: Callable[[], None]) -> None:
    """Runs a script's main(); a UserError is printed without a traceback, and ends the script with status 1.

    So does a file that cannot be read or written.
    """
    from mixtape_plugin.errors import UserError, print_user_errors

    print_user_errors()
    try:
        main()
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:  # what reads the output, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the interpreter's own last flush
        sys.exit(128 + signal.SIGPIPE)  # as a shell says it of other programs
    except OSError as error:
        if error.filename is None:
            if error.errno == errno.ENOSPC:
                raise UserError("what this prints cannot be written: the disk is full") from error
            raise
        raise UserError(f"{error.filename}: {error.strerror or error}") from error
