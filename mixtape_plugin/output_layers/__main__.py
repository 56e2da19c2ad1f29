"""The names that --output-layer takes, a line each: ``python -m mixtape_plugin.output_layers``."""

from mixtape_plugin.output_layers import OUTPUT_LAYERS

print("\n".join(OUTPUT_LAYERS))
