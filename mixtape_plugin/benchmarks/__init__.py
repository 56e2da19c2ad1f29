"""Time and memory of layers and networks; scripts/benchmark_*.py are the command lines over it."""
