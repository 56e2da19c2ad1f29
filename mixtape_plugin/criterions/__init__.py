"""Criterions; importing them registers them with fairseq."""

import mixtape_plugin

mixtape_plugin.register()

from mixtape_plugin.criterions import awd_lstm_cross_entropy, output_layer_cross_entropy  # noqa: E402, F401
