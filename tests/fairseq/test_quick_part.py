"""`pytest -m "not slow"` trains nothing through fairseq, whatever is added to the tests: see conftest.py."""

from pathlib import Path

import pytest
from conftest import LONGEST, console_script, start
from fairseq.trainer import Trainer


def refusal():
    with pytest.raises(pytest.fail.Exception) as refused:
        Trainer.train_step(None, [])
    return str(refused.value)


@pytest.fixture(scope="module")
def shared():
    return refusal()


@pytest.fixture
def trained_nothing():
    pass


def test_a_test_without_the_marker_cannot_train(request):
    assert refusal() == f"{request.node.nodeid} trains: mark it slow"
    process = start(console_script("train"), "--help")
    assert process.communicate()[1].endswith("SystemExit: a test that is not marked slow runs fairseq-train\n")
    assert process.returncode == 1


@pytest.mark.slow
def test_nor_can_a_fixture_of_several_tests(shared):
    assert shared == "the fixture shared trains: call it trained_shared"
    assert Trainer.train_step.__module__ == "fairseq.trainer", "a slow test can"


def test_a_fixture_that_trains_makes_the_test_slow(trained_nothing, request):
    assert request.node.get_closest_marker("slow")
    assert Trainer.train_step.__module__ == "fairseq.trainer"


def test_the_files_that_take_longest_are_there():
    assert set(LONGEST) <= {path.stem for path in Path(__file__).parents[1].glob("*/test_*.py")}
