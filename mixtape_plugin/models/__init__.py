"""Models; importing them registers them with fairseq."""

import mixtape_plugin

mixtape_plugin.register()

from mixtape_plugin.models import awd_lstm_lm, dialog_seq2seq, transformer, transformer_lm  # noqa: E402, F401
