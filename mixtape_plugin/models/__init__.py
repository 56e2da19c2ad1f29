"""Models; importing them registers them with fairseq."""

from mixtape_plugin.models import awd_lstm_lm, dialog_seq2seq, transformer  # noqa: F401
