"""The model in float64: step by step equals all at once, and neighbours and padding in a batch change nothing."""

from types import SimpleNamespace

import pytest
import torch
from conftest import LAYERS, build_small_model, left_padded, make_dictionary, right_padded
from fairseq.models import BaseFairseqModel
from fairseq.sequence_generator import SequenceGenerator

from mixtape_plugin.criterions.output_layer_cross_entropy import OutputLayerCrossEntropy

DICTIONARY = make_dictionary()
BOS, PAD, EOS = DICTIONARY.bos(), DICTIONARY.pad(), DICTIONARY.eos()
# Sentences longer than the distance of 3 from which on all positions count as equally far.
SOURCES = [[7, 12, 30, 9, 9, 21, 5, 6, EOS], [4, 11, EOS], [33, 8, 17, 20, 16, 4, EOS], [25, EOS]]
TARGETS = [[10, 4, 4, 28, EOS], [31, 9, 14, 22, 13, 6, 19, 27, 8, EOS], [18, EOS], [5, 30, 29, 11, 7, 12, EOS]]
POSITIONS = {
    "relative": {"max_relative_position": 3, "no_token_positional_embeddings": True},
    "both": {"max_relative_position": 3},
    "absolute": {},
}


def make_sample(numbers):
    """A batch of fairseq: sources padded on the left, targets on the right."""
    sources, targets = ([sentences[n] for n in numbers] for sentences in (SOURCES, TARGETS))
    return {
        "net_input": {
            "src_tokens": left_padded(sources, PAD),
            "src_lengths": torch.tensor([len(source) for source in sources]),
            "prev_output_tokens": right_padded([[EOS] + target[:-1] for target in targets], PAD),
        },
        "target": right_padded(targets, PAD),
        "ntokens": sum(map(len, targets)),
    }


@pytest.mark.parametrize("output_layer", ["mixtape", "mos"])
@pytest.mark.parametrize("positions", POSITIONS)
def test_one_token_at_a_time_equals_the_whole_sequence(positions, output_layer):
    model = build_small_model(output_layer=output_layer, **POSITIONS[positions])
    sample = make_sample(range(4))
    tokens = sample["net_input"]["prev_output_tokens"]
    with torch.no_grad():
        encoded = model.encoder(sample["net_input"]["src_tokens"], sample["net_input"]["src_lengths"])
        whole, _ = model.decoder(tokens, encoded)
        state = {}
        steps = [model.decoder(tokens[:, : t + 1], encoded, state)[0] for t in range(tokens.size(1))]
    assert all(step.size(1) == 1 for step in steps)
    real = tokens.ne(PAD)
    # fairseq's own self-attention takes its softmax in float32 where it has an incremental state.
    tolerance = 1e-5 if positions == "absolute" else 1e-10
    torch.testing.assert_close(torch.cat(steps, dim=1)[real], whole[real], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("output_layer", ["mixtape", "mos"])
def test_beam_search_of_a_batch_equals_single_sentences(output_layer, positions):
    model = build_small_model(output_layer=output_layer, **POSITIONS[positions])
    generator = SequenceGenerator([model], DICTIONARY, beam_size=3, max_len_b=12)

    def search(numbers):
        net_input = make_sample(numbers)["net_input"]
        del net_input["prev_output_tokens"]
        return generator.generate([model], {"net_input": net_input})

    batch = search(range(4))
    assert len({tuple(hypos[0]["tokens"].tolist()) for hypos in batch}) > 1, "the model looks at its source"
    for number, in_batch in enumerate(batch):
        (alone,) = search([number])
        assert [hypo["tokens"].tolist() for hypo in in_batch] == [hypo["tokens"].tolist() for hypo in alone]
        for one, other in zip(in_batch, alone):  # fairseq searches in float32
            torch.testing.assert_close(one["positional_scores"], other["positional_scores"], rtol=1e-5, atol=1e-5)
        # Beams change places at each step: what was searched must be what the whole sequence gives.
        for hypo in in_batch:
            source, output = torch.tensor([SOURCES[number]]), hypo["tokens"][None]
            previous = torch.cat([torch.tensor([[EOS]]), output[:, :-1]], dim=1)
            with torch.no_grad():
                log_probs = model(source, torch.tensor([source.size(1)]), previous)[0].log_softmax(-1)
            forced = log_probs.gather(-1, output.unsqueeze(-1)).flatten().float()
            torch.testing.assert_close(hypo["positional_scores"], forced, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("output_layer", LAYERS)
def test_padding_changes_nothing(output_layer, label_smoothing):
    model = build_small_model(output_layer=output_layer, **POSITIONS["relative"])
    task = SimpleNamespace(target_dictionary=DICTIONARY)
    criterion = OutputLayerCrossEntropy(task, sentence_avg=False, label_smoothing=label_smoothing).eval()

    def loss_and_gradients(numbers):
        model.zero_grad()
        loss, sample_size, logged = criterion(model, make_sample(numbers))
        loss.backward()
        assert sample_size == sum(len(TARGETS[n]) for n in numbers)
        return [loss.detach(), logged["nll_loss"], *(p.grad.clone() for p in model.parameters())]

    batch = loss_and_gradients(range(4))
    alone = [loss_and_gradients([number]) for number in range(4)]
    for together, parts in zip(batch, zip(*alone)):  # fairseq's attention to the source is a softmax in float32
        torch.testing.assert_close(together, sum(parts), rtol=1e-5, atol=1e-5)


def test_a_language_model_that_masks_nothing_may_be_subtracted():
    class Model(BaseFairseqModel):
        def max_decoder_positions(self):
            return 9

    SequenceGenerator([Model()], make_dictionary(), lm_model=Model(), lm_weight=-0.5)
