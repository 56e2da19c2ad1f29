"""Fused losses in half precision beside the formula in float64."""

import torch


def assert_rounded_alone(layer, features, target, how, label_smoothing):
    """An eager layer's loss and gradients in float64, and those of its fused loss in half precision, which differ by
    rounding alone.

    Args:
        how: the type, which the layer has, or after "autocast" its matrix products.
        features: float32, [N, D].
    """
    device = features.device.type
    autocast, dtype = how.startswith("autocast"), getattr(torch, how.split()[-1])
    layer.to(dtype).double()  # rounded once for both
    features = features.to(dtype).double()

    def gradients(features):
        features.requires_grad_()
        loss, _ = layer.loss(features, target, label_smoothing=label_smoothing)
        return [x.double() for x in (loss, *torch.autograd.grad(loss, [features, *layer.parameters()]))]

    layer.config.output_impl = "eager"
    expected = gradients(features)
    layer.config.output_impl = "fused"
    layer.to(torch.float32 if autocast else dtype)
    with torch.autocast(device, dtype, enabled=autocast):
        actual = gradients(features.detach().to(layer.weight.dtype))
    for found, exact in zip(actual, expected):
        assert (found - exact).norm() <= 8 * torch.finfo(dtype).eps * exact.norm()
