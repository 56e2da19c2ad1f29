"""Checkpoints as files: none runs code, one that is refused or damaged is named, and a copy is whole or not there."""

import argparse
import errno
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils, file_io, file_utils, utils
from fairseq.file_io import PathManager
from fairseq.models import BaseFairseqModel
from omegaconf import OmegaConf
from toy_checkpoints import Pickled, by_allow_list, load, load_content, save

from mixtape_plugin.errors import UserError
from mixtape_plugin.fairseq_compat import checkpoints, safe_globals
from mixtape_plugin.fairseq_compat.options_as_python import evaluate_value
from mixtape_plugin.output_layers import OutputLayerConfig, build_output_layer


def test_options_of_a_checkpoint_run_no_code(tmp_path):
    """A checkpoint of allow-listed classes alone chooses an architecture of fairseq that evaluates its options."""
    ran, layers = tmp_path / "ran", "[(8, 3)]"
    for language in "ab":
        (tmp_path / f"dict.{language}.txt").write_text("x 1\n")

    def load_model(layers):
        sizes = dict.fromkeys(("encoder_embed_dim", "decoder_embed_dim", "decoder_out_embed_dim"), 8)
        others = dict.fromkeys(("encoder_embed_path", "decoder_embed_path", "share_input_output_embed"))
        sizes.update(max_source_positions=9, max_target_positions=9, dropout=0.0, decoder_layers="[(8, 3)] * 2")
        model = argparse.Namespace(
            arch="fconv", _name="fconv", encoder_layers=layers, decoder_attention="True", **sizes, **others
        )
        task = {"_name": "translation", "data": str(tmp_path), "source_lang": "a", "target_lang": "b"}
        path = save(None, tmp_path / "checkpoint.pt", cfg={"model": model, "task": task})
        checkpoint_utils.load_model_ensemble_and_task([path])

    with pytest.raises(UserError, match="the option .*__import__.*, which fairseq takes as Python, is not evaluated"):
        load_model(f"__import__('pathlib').Path({str(ran)!r}).touch() or {layers}")
    assert not ran.exists()
    with pytest.raises(UserError, match="does not fit the model .*decoder.convolutions.1"):  # which has been built
        load_model(layers)


@pytest.mark.parametrize("member", ["model/dict.txt", "../evil", "model/../../evil", "model/link/evil"])
def test_an_archive_stays_in_its_folder(tmp_path, monkeypatch, member):
    """What from_pretrained("model.tar.gz") unpacks: neither a name nor a link leads out of its folder."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "content").write_text("x 1\n")
    archive = tmp_path / "model.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        link = tarfile.TarInfo("model/link")
        link.type, link.linkname = tarfile.SYMTYPE, "../.."
        if "link" in member:
            tar.addfile(link)
        for name in ("model/first.txt", member):
            tar.add(tmp_path / "content", name)
    if member == "model/dict.txt":
        assert Path(file_utils.load_archive_file(str(archive)), "dict.txt").read_text() == "x 1\n"
    else:
        with pytest.raises(UserError, match=f"archive {archive} is not unpacked: .* outside the destination"):
            file_utils.load_archive_file(str(archive))
    assert not list(tmp_path.rglob("evil"))


def test_an_archive_that_cannot_be_kept_in_its_folder_is_refused(tmp_path, monkeypatch):
    """By Python 3.11.0 to 3.11.3, among others."""
    archive = tmp_path / "model.tar.gz"
    tarfile.open(archive, "w:gz").close()
    monkeypatch.delattr(tarfile, "data_filter")
    with pytest.raises(UserError, match=f"archive {archive} is not unpacked: Python 3.* cannot keep its members"):
        file_utils.load_archive_file(str(archive))


def test_what_options_are_evaluated():
    assert evaluate_value("[(512, 3)] * 2 + [(1, -2)]") == [(512, 3), (512, 3), (1, -2)]
    assert evaluate_value("(0.9, 0.98)") == (0.9, 0.98)
    assert evaluate_value("2*1e-4, 1/1000") == (2e-4, 1e-3)
    assert evaluate_value("{'data': 'a b'}") == {"data": "a b"}
    assert evaluate_value(" -(1 + 2) ") == -3
    assert [utils.eval_bool(value) for value in (True, None, "True")] == [False, False, True], "as in stock fairseq"
    too_much = [
        "[0]*99999999999999",
        "9999999999*[0]",
        "[1]*9999*9999",
        "20000*[0]",
        "9**9",
        "-" * 20000 + "1",
        "(" * 9999,
    ]
    no_values = ["9* *9", "e", "1/0", "print(1)", "().__class__", "[1] * x", "1 +", "[0 for x in (1, 2)]"]
    for text in too_much + no_values:
        with pytest.raises(UserError, match="is not evaluated"):
            evaluate_value(text)


@by_allow_list
@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("loader", ["load_checkpoint_to_cpu", "load_ema_from_checkpoint"])
def test_foreign_pickle_is_refused_and_never_runs(tmp_path, loader, zipped):
    ran = tmp_path / "ran"
    attack = Pickled(os.system, f"touch {ran}")
    path = save(attack, tmp_path / "attack.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(UserError, match=r"attack\.pt .*a pickled (posix|nt)\.system, .*could run code"):
        getattr(checkpoint_utils, loader)(path)
    assert not ran.exists()
    pickle.loads(pickle.dumps(attack))  # the attack itself is real
    assert ran.exists()


@by_allow_list
@pytest.mark.parametrize(
    "state, name",
    [
        (Pickled(eval, "1"), "eval"),
        (Pickled(getattr, 1, "real"), "getattr"),
        (Pickled(__import__, "os"), "__import__"),
        (UserError("any other class"), "mixtape_plugin.errors.UserError"),
        (np.complex128(1), "numpy.dtype('c16')"),
        (np.str_("text"), "numpy.dtype('U4')"),
        (Pickled(bytes, 9**9), "bytes"),
        (np.array([None]), "numpy.dtype('O8')"),
        (np.zeros(1, dtype="i4,O"), "numpy.dtype('V12')"),
        (np.array(["text"]), "numpy.dtype('U4')"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_on_the_list_is_refused_by_name(tmp_path, state, name):
    with pytest.raises(UserError) as refusal:
        load(save(state, tmp_path / "other.pt"))
    assert f"a pickled {name}, which is not on the list" in str(refusal.value).replace("numpy.core", "numpy._core")


@by_allow_list
def test_arrays_of_a_checkpoint_cannot_take_its_bytes_for_objects(tmp_path):
    """With numpy's own classes on the list, either of these makes Python objects out of bytes in the file."""
    plain = np.arange(1)
    _, _, state = plain.__reduce__()
    version, shape, _, order, data = state
    objects = (version, shape, np.dtype("O"), order, data)
    record = (3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 1, 0)
    attacks = {
        "constructor": Pickled(np.ndarray, (1,), "O", b"\0" * 8),
        "state": Pickled(np.ndarray, (1,), objects),
        "dtype": Pickled(np.dtype, "V8", False, True),
        "dtype state": Pickled(np.dtype, "i8", record),
    }
    for name, attack in attacks.items():
        try:
            content = load_content(save(attack, tmp_path / f"{name}.pt"))
        except UserError:
            continue
        assert not isinstance(content, np.ndarray) or (content.size == 0 and content.dtype == float), name
    with pytest.raises(pickle.UnpicklingError):
        safe_globals._CheckpointArray().__setstate__(objects)
    number = safe_globals._CheckpointDtype("i8")
    number.__setstate__(record)
    assert number.dtype == np.dtype("i8") and number.dtype.fields is None


@pytest.mark.parametrize("dtype", ["?", "u1", "i4", "i8", ">i8", "f2", "f4", "f8", ">f8"])
def test_plain_arrays_survive_a_checkpoint(tmp_path, dtype):
    for array in np.arange(24).reshape(2, 3, 4), np.asfortranarray(np.eye(3)), np.array(7), np.zeros((0, 3)):
        saved = array.astype(dtype)
        loaded = load_content(save(saved, tmp_path / "array.pt"))
        again = pickle.loads(pickle.dumps(loaded))  # what the next checkpoint will hold
        assert type(again) is np.ndarray
        for result in loaded, again:
            np.testing.assert_array_equal(result, saved)
            assert result.dtype == saved.dtype.newbyteorder("=")


def test_numbers_of_numpy_survive_a_checkpoint(tmp_path):
    """Such as a criterion of somebody's own logs."""
    for number in np.float64(0.1), np.float32(0.1), np.float16(0.1), np.int64(-(2**40)), np.uint8(200), np.bool_(True):
        loaded = load_content(save(number, tmp_path / "number.pt"))
        assert loaded == number and type(loaded) is type(number)


@pytest.mark.parametrize("interruption", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_copy_of_a_checkpoint_is_whole_or_not_there(tmp_path, monkeypatch, interruption):
    """fairseq's checkpoint_best.pt and checkpoint_last.pt, whatever happens in the middle of copying."""
    new, last = tmp_path / "checkpoint2.pt", tmp_path / "checkpoint_last.pt"
    new.write_bytes(b"new" * 1000)
    last.write_bytes(b"old" * 1000)

    def half(src, dst, *args, **kwargs):
        Path(dst).write_bytes(Path(src).read_bytes()[:700])
        raise interruption

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", half)
        expected = UserError if isinstance(interruption, OSError) else KeyboardInterrupt
        with pytest.raises(expected, match="checkpoint_last.pt .*No space left" if expected is UserError else None):
            PathManager.copy(str(new), str(last), overwrite=True)
    assert last.read_bytes() == b"old" * 1000 and sorted(tmp_path.iterdir()) == [new, last]
    assert PathManager.copy(str(new), str(last), overwrite=True)
    assert last.read_bytes() == b"new" * 1000 and sorted(tmp_path.iterdir()) == [new, last]
    (link := tmp_path / "link.pt").symlink_to(last)
    new.write_bytes(b"newer")
    assert PathManager.copy(str(new), str(link), overwrite=True)
    assert link.is_symlink() and last.read_bytes() == b"newer"


def test_a_copy_to_a_place_that_is_no_disk_is_left_to_fairseq(monkeypatch):
    """Which asks iopath, where that is installed."""
    elsewhere = mock.Mock()
    monkeypatch.setattr(file_io, "IOPathManager", elsewhere)
    PathManager.copy("checkpoint2.pt", "store://bucket/checkpoint_last.pt", overwrite=True)
    elsewhere.copy.assert_called_once_with(
        src_path="checkpoint2.pt", dst_path="store://bucket/checkpoint_last.pt", overwrite=True
    )


def test_a_checkpoint_for_which_there_is_no_room(tmp_path, monkeypatch):
    """The sentence, and what was there; torch closes its archive in vain, and raises an error of its own."""

    def full(obj, file, *args, **kwargs):
        file.write(b"new")
        try:
            raise OSError(28, "No space left on device")
        finally:
            raise RuntimeError("unexpected pos 64 vs 0")

    monkeypatch.setattr(torch, "save", full)
    monkeypatch.setattr(checkpoint_utils.time, "sleep", lambda seconds: None)  # fairseq tries it three times
    path = tmp_path / "checkpoint1.pt"
    path.write_bytes(b"old")
    with pytest.raises(UserError, match=f"^{path} is not written .No space left on device.: what was there before is"):
        checkpoint_utils.torch_persistent_save({}, str(path))
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
    monkeypatch.setattr(torch, "save", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        checkpoint_utils.torch_persistent_save({}, str(path))


def test_a_checkpoint_killed_while_it_is_copied(tmp_path):
    """What a SIGKILL leaves: the one before."""
    code = """
import os, shutil, signal, sys
import mixtape_plugin
mixtape_plugin.register()
from fairseq.file_io import PathManager

def half(src, dst, *args, **kwargs):
    open(dst, "wb").write(b"new")
    os.kill(os.getpid(), signal.SIGKILL)

shutil.copyfile = half
PathManager.copy("new.pt", "checkpoint_last.pt", overwrite=True)
"""
    (tmp_path / "new.pt").write_bytes(b"new" * 1000)
    (tmp_path / "checkpoint_last.pt").write_bytes(b"old" * 1000)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert (tmp_path / "checkpoint_last.pt").read_bytes() == b"old" * 1000


@by_allow_list
@pytest.mark.parametrize(
    "content", [b"", b"no checkpoint", b"PK\x03\x04 half an archive", b"\x80\x02.", b"\x80\x02]q\0.", "cut"]
)
def test_damaged_checkpoint_is_named(tmp_path, content):
    path = tmp_path / "damaged.pt"
    save(torch.zeros(1000), path)
    path.write_bytes(path.read_bytes()[:2000] if content == "cut" else content)
    with pytest.raises(UserError, match="damaged.pt is damaged or is no checkpoint"):
        load(path)


@pytest.mark.parametrize("state", [{"extra_state": {}, "model": {}}, {"model": {}}])
def test_a_checkpoint_without_a_moving_average_is_not_called_damaged(tmp_path, state):
    torch.save(state, tmp_path / "plain.pt")
    with pytest.raises(UserError, match="plain.pt holds no moving average: it was trained without --store-ema"):
        checkpoint_utils.load_ema_from_checkpoint(tmp_path / "plain.pt")


@by_allow_list
@pytest.mark.parametrize(
    "failure, sentence",
    [
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "does not fit into the memory"),
        (OSError(errno.EIO, os.strerror(errno.EIO)), "cannot be read: Input/output error"),
    ],
)
def test_a_whole_checkpoint_is_not_called_damaged(tmp_path, monkeypatch, failure, sentence):
    def fail(*args, **kwargs):
        raise failure

    path = save(torch.zeros(10), tmp_path / "whole.pt")
    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(UserError, match=f"whole.pt {sentence}"):
        load(path)


def test_old_torch_loads_only_for_those_who_trust(tmp_path, monkeypatch):
    path = save(1, tmp_path / "any.pt")
    monkeypatch.setattr(checkpoints, "loads_weights_only", lambda: False)
    monkeypatch.delenv(checkpoints.TRUST_CHECKPOINTS, raising=False)
    with pytest.raises(UserError, match="MIXTAPE_TRUST_CHECKPOINTS=1"):
        load(path)
    monkeypatch.setenv(checkpoints.TRUST_CHECKPOINTS, "1")
    assert load_content(path) == 1


@pytest.mark.parametrize("other", ["softmax", "mos", "moc", "plif"])
def test_parameters_of_another_layer_are_refused_in_a_sentence(other):
    def model(name):
        model = BaseFairseqModel()
        model.decoder = torch.nn.Module()
        config = OutputLayerConfig(output_layer=name, gate_dim=3, plif_pieces=4)
        model.decoder.output_projection = build_output_layer(config, feature_dim=5, vocab_size=8)
        return model

    weights = model(other).state_dict()
    with pytest.raises(UserError, match="does not fit --output-layer mixtape: it .* wants gate_embedding .4, 3.,"):
        model("mixtape").load_state_dict(weights)
    model("mixtape").load_state_dict(weights, strict=False)
    model(other).load_state_dict(weights)
    stock = {"decoder.output_projection.weight": weights["decoder.output_projection.weight"]}
    with pytest.raises(UserError, match=f"fairseq's own model, .* for .*{other} .* --finetune-from-model, in"):
        model(other).load_state_dict(stock)


def test_missing_checkpoint_stays_fairseqs_own_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none.pt")


def test_options_as_namespace_and_as_omegaconf_tree(tmp_path):
    """`args` of older checkpoints, `cfg` with a Namespace of fairseq-train, `cfg` of fairseq-hydra-train."""
    namespace = argparse.Namespace(arch="transformer", dropout=0.1)
    tree = OmegaConf.to_container(OmegaConf.create({"model": {"_name": "transformer_lm", "dropout": 0.1}}))
    for args, cfg in (namespace, None), (None, {"model": namespace}), (None, tree):
        state = load(save(None, tmp_path / "options.pt", args=args, cfg=cfg))
        model_options = state["args"] if args else state["cfg"]["model"]
        assert model_options.dropout == 0.1


@pytest.mark.parametrize("version, safe", [("2.5.1", False), ("2.6.0+cpu", True), ("2.10.0", True), ("3.0.0", True)])
def test_which_torch_has_an_allow_list(version, safe, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    assert checkpoints.loads_weights_only() == safe
