"""Models; importing them registers them with fairseq."""

from mixtape_plugin.models import awd_lstm_lm, transformer  # noqa: F401
