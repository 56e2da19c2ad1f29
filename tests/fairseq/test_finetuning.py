"""Training that begins from a checkpoint of another output layer, or goes on with one, through fairseq-train."""

import re
from argparse import Namespace

import pytest
import torch
from conftest import USER_DIR, build_model, load_parameters, run, train_args

from mixtape_plugin.errors import UserError
from mixtape_plugin.fairseq_compat.checkpoints import begin_other_parameters_anew, check_output_layer


@pytest.mark.slow
@pytest.mark.parametrize(
    "before, after, flag",
    [
        ("--output-layer mos", "--output-layer moc", "--output-layer"),
        ("--output-layer sigsoftmax", "--output-layer softmax", "--output-layer"),
        ("--output-layer gss --gss-k 2", "--output-layer gss --gss-k 3", "--gss-k"),
        ("--output-layer mixtape --gate-weight-norm", "--output-layer mixtape", "--gate-weight-norm"),
        ("--output-layer plif --plif-range 20", "--output-layer plif --plif-range 10", "--plif-range"),
    ],
)
def test_another_layer_of_the_same_shapes(before, after, flag, data, tmp_path):
    """A training does not go on with it, its checkpoints stay; a new one may begin from its weights, and says so."""
    run("train", *train_args(data, tmp_path / "first", *before.split(), "--max-update", 2))
    checkpoint = tmp_path / "first" / "checkpoint_last.pt"
    content = checkpoint.read_bytes()
    with pytest.raises(UserError, match=rf"trained with {flag} \S+, not \S+: go on with") as error:
        run("train", *train_args(data, tmp_path / "first", *after.split()))
    assert str(checkpoint) in str(error.value) and checkpoint.read_bytes() == content

    more = [*after.split(), "--finetune-from-model", checkpoint]
    output = run("train", *train_args(data, tmp_path / "second", *more)).stdout
    assert re.search(rf"WARNING .* was trained with {flag} \S+; its weights begin a training with", output)
    output = run("train", *train_args(data, tmp_path / "second", *more, "--max-update", 6)).stdout
    assert "Loaded checkpoint" in output and "was trained with" not in output


@pytest.mark.slow
@pytest.mark.parametrize("layer", ["softmax", "mos", "mixtape"])
def test_finetuning_from_a_network_without_this_layer(layer, data, tmp_path):
    """All that fairseq's own Transformer has is kept, what the layer has beside it begins as in any training."""
    arch, criterion = "--arch transformer --share-decoder-input-output-embed", "--criterion cross_entropy"
    stock = [word for word in train_args(data, tmp_path / "stock") if word not in ("--gate-dim", "8")]
    run("train", *stock, *arch.split(), *criterion.split())
    checkpoint = tmp_path / "stock" / "checkpoint_last.pt"
    more = f"--output-layer {layer} --share-decoder-input-output-embed --max-update 1 --lr 0".split()
    output = run("train", *train_args(data, tmp_path / "tuned", *more, "--finetune-from-model", checkpoint))
    run("train", *train_args(data, tmp_path / "fresh", *more))
    before, tuned, fresh = (
        load_parameters(tmp_path / name / "checkpoint_last.pt") for name in ("stock", "tuned", "fresh")
    )
    assert tuned.keys() == fresh.keys() and before.keys() < tuned.keys()
    for name, value in tuned.items():
        torch.testing.assert_close(value, before.get(name, fresh[name]), rtol=0, atol=0, msg=name)
    begun = ", ".join(name.rpartition("output_projection.")[2] for name in tuned if name not in before)
    assert f"--output-layer {layer}; of its parameters these begin anew: {begun}" in output.stdout
    if layer == "softmax":  # fairseq's own, and a bias of zeros
        args = [data, "--task", "translation", "--max-tokens", 512, "--cpu", "--user-dir", USER_DIR]
        losses = []
        for name in ("stock", "tuned"):
            path = tmp_path / name / "checkpoint_last.pt"
            log = run("validate", *args, "--path", path, "--log-format", "json").stdout
            losses.append(re.search(r'"valid_loss": "([\d.]+)"', log)[1])
        assert losses[0] == losses[1]


@pytest.mark.slow
@pytest.mark.parametrize("precision", [[], ["--ema-fp32"]])
def test_finetuning_with_a_moving_average(precision, data, tmp_path):
    """The average, too, keeps what both layers have, and begins with the new layer's own values of the rest."""
    ema = ["--store-ema", "--ema-decay", 0.5, *precision]
    run("train", *train_args(data, tmp_path / "first", "--output-layer", "mixtape", *ema, "--max-update", 2))
    checkpoint = tmp_path / "first" / "checkpoint_last.pt"
    more = ["--output-layer", "mos", "--finetune-from-model", checkpoint, "--max-update", 1, "--lr", 0]
    run("train", *train_args(data, tmp_path / "second", *more, *ema))
    before, after = (
        torch.load(tmp_path / name / "checkpoint_last.pt", weights_only=True) for name in ("first", "second")
    )
    for name, average in after["extra_state"]["ema"].items():
        now, then = after["model"][name], before["extra_state"]["ema"].get(name)
        if then is None or then.shape != now.shape:
            torch.testing.assert_close(average, now, rtol=0, atol=0, msg=name)
        else:  # one step with a decay of .5 from the average to the weights, which do not move
            torch.testing.assert_close(average, (then + now) / 2, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("precision", [[], ["--ema-fp32"]])
def test_a_moving_average_begins_with_the_weights_where_there_is_none(precision, data, tmp_path):
    run("train", *train_args(data, tmp_path / "first", "--max-update", 2))
    checkpoint = tmp_path / "first" / "checkpoint_last.pt"
    before = torch.load(checkpoint, weights_only=True)["model"]
    ema = ["--store-ema", "--ema-decay", 0.5, *precision]
    tuned = ["--finetune-from-model", checkpoint, "--max-update", 1]
    for name, *more in ("tuned", *tuned), ("first", "--max-update", 3):
        run("train", *train_args(data, tmp_path / name, *more, *ema))
        after = torch.load(tmp_path / name / "checkpoint_last.pt", weights_only=True)
        for parameter, average in after["extra_state"]["ema"].items():
            expected = (before[parameter] + after["model"][parameter]) / 2
            torch.testing.assert_close(average, expected, msg=parameter)


def test_finetuning_from_another_shape(caplog):
    """Of the same layer with more components, what does not depend on their number is kept."""
    few, many = build_model(output_layer="mos", num_components=2), build_model(output_layer="mos", num_components=3)
    weights, average = few.state_dict(), few.state_dict()
    begin_other_parameters_anew("few.pt", weights, many, (average, None))
    assert average.keys() == weights.keys() and all(torch.equal(average[name], weights[name]) for name in weights)
    trained = {parameter.data_ptr() for parameter in many.parameters()}
    assert not trained & {value.data_ptr() for value in (*weights.values(), *average.values())}, "copies"
    many.load_state_dict(weights, strict=True)
    layer = many.decoder.output_projection
    torch.testing.assert_close(layer.bias, few.decoder.output_projection.bias, rtol=0, atol=0)
    torch.testing.assert_close(layer.weight, few.decoder.output_projection.weight, rtol=0, atol=0)
    (record,) = caplog.records
    anew = [name for name, _ in layer.named_parameters() if name not in ("weight", "bias")]
    assert record.message.endswith("begin anew: " + ", ".join(anew))
    caplog.clear()
    begin_other_parameters_anew("many.pt", dict(many.state_dict()), many)
    assert not caplog.records


TIED = {"share_decoder_input_output_embed": True}


@pytest.mark.parametrize("before", [{"output_layer": "mos", "output_embed_dim": 12}, {"output_layer": "softmax"}])
def test_a_tied_output_embedding_becomes_the_trained_input_embedding(before, caplog):
    """Where the checkpoint's was not tied, of another shape or of the same."""
    old, new = build_model(**before), build_model(output_layer="softmax", **TIED)
    weights = dict(old.state_dict())
    begin_other_parameters_anew("old.pt", weights, new)
    new.load_state_dict(weights, strict=True)
    for name, parameter in old.named_parameters():
        if "output_projection" not in name:
            assert torch.equal(new.state_dict()[name], parameter), name
    (record,) = caplog.records
    assert record.message.endswith("begin anew: nothing; weight, which is tied, becomes decoder.embed_tokens.weight")
    caplog.clear()
    begin_other_parameters_anew("new.pt", dict(new.state_dict()), new)
    assert not caplog.records


def test_embeddings_that_become_one_have_to_be_alike():
    old, new = (
        build_model(output_layer="softmax", **TIED),
        build_model(output_layer="softmax", share_all_embeddings=True),
    )
    sentence = "old.pt holds different encoder.embed_tokens.weight and decoder.embed_tokens.weight, which --share-all-"
    with pytest.raises(UserError, match=sentence):
        begin_other_parameters_anew("old.pt", dict(old.state_dict()), new)


def test_two_embeddings_are_not_loaded_into_one():
    """Not without a word: the one that is loaded last would be both."""
    old, new = build_model(output_layer="softmax"), build_model(output_layer="softmax", **TIED)
    with pytest.raises(UserError, match=r"^the checkpoint's decoder.output_projection.weight differs from its decoder"):
        new.load_state_dict(old.state_dict())
    old.decoder.output_projection.weight.data.copy_(old.decoder.embed_tokens.weight)
    new.load_state_dict(old.state_dict())
    assert torch.equal(new.decoder.embed_tokens.weight, old.decoder.embed_tokens.weight)


def test_every_option_that_differs_is_said(caplog):
    """Where the layer is another one, its options say nothing."""
    options = {"output_layer": "gss", "gss_c": -1.0, "gss_k": 3.0}
    for layer, said in ("gss", ["--gss-c", "--gss-k"]), ("softmax", ["--output-layer"]):
        caplog.clear()
        saved = Namespace(**{**options, "output_layer": layer})
        check_output_layer("a.pt", saved, build_model(output_layer="gss"), new_training=True)
        assert [re.search(r"trained with (\S+)", record.message)[1] for record in caplog.records] == said
