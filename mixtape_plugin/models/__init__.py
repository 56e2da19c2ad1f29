"""Models; importing them registers them with fairseq."""

from mixtape_plugin.models import transformer  # noqa: F401
