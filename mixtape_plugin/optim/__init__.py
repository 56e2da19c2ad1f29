"""Optimizers; importing them registers them with fairseq."""

from mixtape_plugin.optim import nt_asgd  # noqa: F401
