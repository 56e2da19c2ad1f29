"""scripts/average_checkpoints.py against a float64 mean by hand, and the checkpoints it must refuse."""

import os
import re
import shutil
from argparse import Namespace
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from recipes import load_script

script = load_script("average_checkpoints")
UserError = script.UserError  # from the plugin as the script imports it


def checkpoint(seed):
    """What fairseq saves, in small: a tied embedding, three types, a version mark, the optimizer's state."""
    torch.manual_seed(seed)
    embedding = torch.randn(7, 3)
    model = {
        "encoder.embed_tokens.weight": embedding,
        "decoder.output_projection.weight": embedding,
        "decoder.output_projection.bias": torch.randn(7, dtype=torch.float64),
        "decoder.layers.0.fc1.weight": (torch.randn(4, 3) * 1e-3).half(),
        "decoder.layers.0.fc2.weight": torch.randn(3, 4).bfloat16(),
        "decoder.version": torch.tensor([3]),
    }
    return {
        "args": None,
        "cfg": {"model": Namespace(arch="mixtape_transformer"), "common": {"seed": seed}},
        "model": model,
        "optimizer_history": [{"optimizer_name": "FairseqAdam", "lr_scheduler_state": {}, "num_updates": 10 * seed}],
        "last_optimizer_state": {"state": {0: {"exp_avg": torch.randn(7, 3)}}},
        "extra_state": {"train_iterator": {"epoch": seed}},
    }


def save(path, **changes):
    state = checkpoint(int("".join(filter(str.isdigit, path.name)) or 0))
    state["model"].update(changes)
    torch.save({**state, "model": {k: v for k, v in state["model"].items() if v is not None}}, path)
    return str(path)


def load(path):
    return torch.load(path, weights_only=True)


def test_mean_by_hand(tmp_path):
    paths = [save(tmp_path / f"checkpoint{i}.pt") for i in (1, 2, 3)]
    script.main(["--inputs", *paths[:2], "--inputs", paths[2], "--output", str(tmp_path / "average.pt")])
    average, models = load(tmp_path / "average.pt"), [load(path)["model"] for path in paths]
    assert average["model"].keys() == models[0].keys()
    for name, value in average["model"].items():
        assert value.dtype == models[0][name].dtype
        columns = zip(*(model[name].flatten().tolist() for model in models))
        exact = [float(sum(map(Fraction, column)) / 3) for column in columns]
        expected = torch.tensor(exact, dtype=torch.float64).to(value.dtype).view_as(value)
        # Float64 has bits to spare for the other types; for itself its sums of numbers around 1 round.
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-15 if value.dtype == torch.float64 else 0)
    last = load(paths[-1])
    assert average["last_optimizer_state"] is None
    for key in last.keys() - {"model", "last_optimizer_state"}:
        assert average[key] == last[key] and type(average[key]) is type(last[key])
    assert sorted(os.listdir(tmp_path)) == ["average.pt", "checkpoint1.pt", "checkpoint2.pt", "checkpoint3.pt"]


def test_tied_parameters_stay_one_tensor(tmp_path):
    script.main(["--inputs", save(tmp_path / "1.pt"), save(tmp_path / "2.pt"), "--output", str(tmp_path / "out.pt")])
    model = load(tmp_path / "out.pt")["model"]
    tied = [model["encoder.embed_tokens.weight"], model["decoder.output_projection.weight"]]
    assert tied[0].data_ptr() == tied[1].data_ptr()
    assert len({value.data_ptr() for value in model.values()}) == len(model) - 1


@pytest.mark.parametrize("copies", [1, 4])
def test_of_one_checkpoint_is_that_checkpoint(tmp_path, copies):
    path = save(tmp_path / "checkpoint1.pt", odd=torch.tensor([float("-inf"), float("inf"), 1.0]))
    script.main(["--inputs", *[path] * copies, "--output", str(tmp_path / "out.pt")])
    before, after = load(path)["model"], load(tmp_path / "out.pt")["model"]
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert value.dtype == after[name].dtype
        assert torch.equal(value.view(torch.uint8), after[name].view(torch.uint8))


def test_last_counts_by_number_not_by_name(tmp_path):
    for name in ["checkpoint2", "checkpoint9", "checkpoint10", "checkpoint_best", "checkpoint_last", "checkpoint11.x"]:
        (tmp_path / f"{name}.pt").touch()
    for name in ["checkpoint_3_500", "checkpoint_3_1000", "checkpoint_2_90"]:
        (tmp_path / f"{name}.pt").touch()

    def names(*args):
        return [os.path.basename(path) for path in script.last_checkpoints(tmp_path, *args)]

    assert names(2) == ["checkpoint9.pt", "checkpoint10.pt"]
    assert names(3) == ["checkpoint2.pt", "checkpoint9.pt", "checkpoint10.pt"]
    assert names(2, "updates") == ["checkpoint_3_500.pt", "checkpoint_3_1000.pt"]
    with pytest.raises(
        UserError, match=r"--last asks for 4 checkpoints, and .* has 3 named checkpointE\.pt: name fewer"
    ):
        names(4)
    with pytest.raises(UserError, match="--last 0 is not allowed: 1 or more"):
        names(0)
    for count in "two", "²":
        with pytest.raises(UserError, match=f"--last {count} is not allowed: a whole number, then a folder"):
            script.main(["--last", count, str(tmp_path), "--output", f"{tmp_path}/average.pt"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"decoder.layers.0.fc1.weight": None},
            "2.pt holds another model than .*1.pt: decoder.layers.0.fc1.weight is missing",
        ),
        ({"new.weight": torch.zeros(2)}, "2.pt holds another model than .*: new.weight is .*float32.* and missing"),
        (
            {"decoder.layers.0.fc2.weight": torch.zeros(4, 3).bfloat16()},
            r"fc2.weight is \(.*\(4, 3\)\) and \(.*\(3, 4\)\)",
        ),
        ({"decoder.layers.0.fc2.weight": torch.zeros(3, 4)}, "fc2.weight is .*float32.* and .*bfloat16"),
        ({"decoder.version": torch.tensor([2])}, "2.pt differs from .*1.pt in decoder.version, of torch.int64"),
    ],
)
def test_refuses_other_models(tmp_path, changes, message):
    paths = [save(tmp_path / "1.pt"), save(tmp_path / "2.pt", **changes)]
    with pytest.raises(UserError, match=message):
        script.main(["--inputs", *paths, "--output", str(tmp_path / "out.pt")])
    assert not (tmp_path / "out.pt").exists()


def test_refuses_parameters_tied_in_the_last_only(tmp_path):
    paths = [save(tmp_path / "1.pt", **{"encoder.embed_tokens.weight": torch.ones(7, 3)}), save(tmp_path / "2.pt")]
    with pytest.raises(UserError, match="is tied to another parameter in .*2.pt and not in every checkpoint before it"):
        script.average(paths)


def test_refuses_to_overwrite_an_input(tmp_path):
    path = save(tmp_path / "checkpoint1.pt")
    before = Path(path).read_bytes()
    with pytest.raises(UserError, match="is read, too: choose another name"):
        script.main(["--last", "1", str(tmp_path), "--output", f"{tmp_path}/../{tmp_path.name}/checkpoint1.pt"])
    assert Path(path).read_bytes() == before


def test_refuses_a_kind_of_checkpoints_that_are_named(tmp_path):
    with pytest.raises(UserError, match="--by updates needs --last: --inputs names the checkpoints"):
        script.main(["--inputs", save(tmp_path / "1.pt"), "--by", "updates", "--output", str(tmp_path / "out.pt")])


@pytest.mark.parametrize("output", ["", "."])
def test_refuses_an_output_without_a_name(output, tmp_path):
    with pytest.raises(UserError, match=f"--output '{re.escape(output)}' is not allowed: the name of a file"):
        script.main(["--inputs", save(tmp_path / "1.pt"), "--output", output])


def test_refuses_a_folder_that_is_not_there_before_it_reads(tmp_path):
    with pytest.raises(UserError, match=f"^--output {tmp_path}/no/out.pt cannot be written: No such file"):
        script.main(["--inputs", str(tmp_path / "missing.pt"), "--output", str(tmp_path / "no" / "out.pt")])


def test_writes_into_a_pipe(tmp_path):
    reading, writing = os.pipe()
    script.main(["--inputs", save(tmp_path / "1.pt"), "--output", f"/proc/self/fd/{writing}"])
    os.close(writing)
    with open(reading, "rb") as pipe:
        assert len(pipe.read()) > 0


def test_refuses_what_is_no_tensor(tmp_path):
    path = save(tmp_path / "1.pt", steps=3)
    with pytest.raises(UserError, match="1.pt holds something else than tensors under 'model'"):
        script.main(["--inputs", path, "--output", str(tmp_path / "out.pt")])
    assert not (tmp_path / "out.pt").exists()


class Evil:
    def __reduce__(self):
        return os.mkdir, ("ran",)


def test_refuses_what_is_no_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = save(tmp_path / "1.pt")
    (tmp_path / "half.pt").write_bytes(Path(path).read_bytes()[:1000])
    torch.save([1, 2], "list.pt")
    torch.save({"model": {"x": torch.ones(1)}}, "parameters.pt")
    torch.save({"model": {"x": Evil()}}, "evil.pt")
    for name, message in {
        "none.pt": "none.pt cannot be read: No such file or directory",
        "half.pt": "half.pt is damaged or is no checkpoint: it cannot be read",
        "list.pt": "list.pt is damaged or is no checkpoint: it cannot be read",
        "parameters.pt": "parameters.pt is damaged or is no checkpoint: it cannot be read",
        "evil.pt": "checkpoint evil.pt is not loaded: it holds a pickled .*mkdir",
    }.items():
        with pytest.raises(UserError, match=message):
            script.main(["--inputs", path, name, "--output", "out.pt"])
    assert not (tmp_path / "ran").exists() and not (tmp_path / "out.pt").exists()


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    paths = [save(tmp_path / "1.pt"), save(tmp_path / "2.pt")]
    shutil.copy(paths[0], tmp_path / "out.pt")
    before = (tmp_path / "out.pt").read_bytes()

    def no_space(state, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", no_space)
    with pytest.raises(UserError, match=r"out.pt cannot be written: No space left on device"):
        script.main(["--inputs", *paths, "--output", str(tmp_path / "out.pt")])
    assert (tmp_path / "out.pt").read_bytes() == before
