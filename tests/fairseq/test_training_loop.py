"""Repairs of fairseq's training loop, on stubs of its trainer; whole trainings are in the files beside."""

import math
from types import SimpleNamespace

import pytest
import torch
from fairseq.dataclass.configs import EMAConfig
from fairseq.models.ema.ema import EMA

from mixtape_plugin.errors import UserError
from mixtape_plugin.fairseq_compat import training_loop


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("samples", [[{}], [{}, {}], [None]])
def test_a_process_without_a_batch_keeps_its_dummies(samples, sharded, monkeypatch):
    """All where parameters are sharded: there every process must take part in each forward pass."""

    class Stub:
        is_fsdp = sharded

        def train_step(self, samples):
            return samples

    monkeypatch.setattr(training_loop, "Trainer", Stub)
    training_loop.leave_out_dummy_batches()
    assert Stub().train_step(samples) == samples
    assert Stub().train_step([*samples, {"id": 1}]) == ([*samples, {"id": 1}] if sharded else [{"id": 1}])


@pytest.mark.parametrize("of_16_bits", [False, True])
@pytest.mark.parametrize("finished", [False, True])
def test_a_training_ends_where_its_optimizer_says_so(of_16_bits, finished, monkeypatch):
    class Stub:
        optimizer = SimpleNamespace(finished=finished)

        def get_lr(self):
            return 0.5

        lr_step = get_lr

    if of_16_bits:  # fairseq wraps it then
        Stub.optimizer = SimpleNamespace(fp32_optimizer=Stub.optimizer)
    monkeypatch.setattr(training_loop, "Trainer", Stub)
    training_loop.end_training_that_is_finished()
    assert Stub().get_lr() == Stub().lr_step() == (-math.inf if finished else 0.5)


@pytest.mark.parametrize(
    "message, sentence",
    [
        (
            "Minimum loss scale reached (0.0001). Your loss is probably exploding.",
            r"^Minimum loss scale reached \(0.0001\) at update 8: ",
        ),
        ("gradients are Nan/Inf", "^gradients are Nan/Inf at update 8: "),
        ("another", None),
    ],
)
def test_an_update_that_diverges_ends_in_a_sentence(message, sentence, monkeypatch):
    class Stub:
        def get_num_updates(self):
            return 7

        def train_step(self):
            raise FloatingPointError(message)

    monkeypatch.setattr(training_loop, "Trainer", Stub)
    training_loop.name_the_update_that_diverged()
    with pytest.raises(UserError, match=sentence) if sentence else pytest.raises(FloatingPointError, match="another"):
        Stub().train_step()


def test_an_average_of_every_third_update_is_of_the_third_the_sixth_and_so_on():
    """Also where a resume begins between them."""
    config = EMAConfig(store_ema=True, ema_update_freq=3, ema_decay=0.5)

    def averaged_at(updates):
        model = torch.nn.Linear(1, 1, bias=False)
        average, found = EMA(model, config), []
        for update in updates:
            before = average.get_model().weight.clone()
            torch.nn.init.constant_(model.weight, 100.0 + update)
            average.step(model, update)
            found += [update] if not torch.equal(before, average.get_model().weight) else []
        return found

    assert averaged_at(range(1, 8)) == [3, 6] and averaged_at(range(5, 8)) == [6]
