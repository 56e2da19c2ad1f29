"""Criterions; importing them registers them with fairseq."""

from mixtape_plugin.criterions import output_layer_cross_entropy  # noqa: F401
