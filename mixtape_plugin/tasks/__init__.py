"""Tasks; importing them registers them with fairseq."""

import mixtape_plugin

mixtape_plugin.register()

from mixtape_plugin.tasks import bptt_language_modeling  # noqa: E402, F401
