"""Criterions; importing them registers them with fairseq."""

from mixtape_plugin.criterions import awd_lstm_cross_entropy, output_layer_cross_entropy  # noqa: F401
