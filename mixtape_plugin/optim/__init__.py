"""Optimizers; importing them registers them with fairseq."""

import mixtape_plugin

mixtape_plugin.register()

from mixtape_plugin.optim import nt_asgd  # noqa: E402, F401
