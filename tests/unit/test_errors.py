"""How a user's mistake is printed: one sentence, the traceback for whoever asks; all other errors as ever."""

import io
import sys
import traceback

import pytest
import torch

from mixtape_plugin import errors
from mixtape_plugin.errors import UserError


def raise_and_catch(function):
    try:
        function()
    except Exception as error:
        return error


def chained(wrap):
    try:
        raise UserError("--num-components is 1, 2 or more is allowed")
    except UserError as error:
        wrap(error)


def reraise(error):
    raise error


def bury(error):
    raise RuntimeError("cannot load model parameters")


def cause(error):
    raise RuntimeError("in between") from error


def suppress(error):
    raise RuntimeError("another matter") from None


@pytest.mark.parametrize(
    "wrap, printed",
    [
        (reraise, "error: --num-components is 1, 2 or more is allowed\n"),
        (bury, "error: --num-components is 1, 2 or more is allowed\n"),
        (cause, "error: --num-components is 1, 2 or more is allowed\n"),
        (suppress, None),
    ],
)
def test_user_error_is_printed_as_a_sentence(wrap, printed, capsys, monkeypatch):
    monkeypatch.delenv(errors.FULL_TRACEBACK, raising=False)
    error = raise_and_catch(lambda: chained(wrap))
    full = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    errors._excepthook(type(error), error, error.__traceback__)
    assert capsys.readouterr().err == (printed or full)
    monkeypatch.setenv(errors.FULL_TRACEBACK, "1")
    errors._excepthook(type(error), error, error.__traceback__)
    assert capsys.readouterr().err == full


def test_other_errors_print_as_ever(capsys):
    error = raise_and_catch(lambda: {}["missing"])
    errors._excepthook(type(error), error, error.__traceback__)
    expected = io.StringIO()
    traceback.print_exception(type(error), error, error.__traceback__, file=expected)
    assert capsys.readouterr().err == expected.getvalue()


def test_user_error_of_a_spawned_process_is_printed_as_a_sentence(capsys):
    error = raise_and_catch(lambda: chained(bury))
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    error = torch.multiprocessing.ProcessRaisedException(f"-- Process 1 terminated:\n{text}", 1, 123)
    errors._excepthook(type(error), error, None)
    assert capsys.readouterr().err == "error: --num-components is 1, 2 or more is allowed\n"
    text = "-- Process 1 terminated:\nFileNotFoundError: Dataset not found: train (data-bin)"  # fairseq's own
    errors._excepthook(None, torch.multiprocessing.ProcessRaisedException(text, 1, 123), None)
    assert capsys.readouterr().err == "error: Dataset not found: train (data-bin)\n"
    error = torch.multiprocessing.ProcessRaisedException("-- Process 1 terminated:\nKeyError: 'x'", 1, 123)
    errors._excepthook(type(error), error, None)
    assert "KeyError" in capsys.readouterr().err


def test_a_hook_of_someone_else_stays(monkeypatch):
    def theirs(*_):
        pass

    monkeypatch.setattr(sys, "excepthook", theirs)
    errors.print_user_errors()
    assert sys.excepthook is theirs
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    errors.print_user_errors()
    assert sys.excepthook is errors._excepthook
