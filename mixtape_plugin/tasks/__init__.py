"""Tasks; importing them registers them with fairseq."""

from mixtape_plugin.tasks import bptt_language_modeling  # noqa: F401
