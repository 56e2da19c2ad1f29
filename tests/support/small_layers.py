"""Output layers that are small enough for formulas in float64, and what goes into them.

Shapes: N tokens, D features, E embedding, V vocabulary.
"""

import torch

from mixtape_plugin.output_layers import OUTPUT_LAYERS, OutputLayerConfig, build_output_layer

N, D, E, V, GATE_DIM = 7, 6, 5, 11, 3
PAD = 1


def build(name, feature_dim=D, vocab_size=V, tied_weight=None, **options):
    embed_dim = E if OUTPUT_LAYERS[name].has_projection else None
    small = {"gate_dim": GATE_DIM, "plif_pieces": 9, "plif_range": 3.0}  # scores are on every piece and beyond them
    options = {**small, "gate_noise": 0.0, "output_embed_dim": embed_dim, **options}
    if tied_weight is not None:
        options["output_embed_dim"] = None
    torch.manual_seed(0)
    layer = build_output_layer(OutputLayerConfig(output_layer=name, **options), feature_dim, vocab_size, tied_weight)
    for parameter in layer.parameters():  # biases too, and gates far from 1/2
        torch.nn.init.normal_(parameter)
    return layer.double()


def random_targets():
    target = torch.randint(2, V, (N,))
    target[2] = PAD
    return target


def gradients(loss, layer, features):
    return torch.autograd.grad(loss, [features, *layer.parameters()], retain_graph=True)
