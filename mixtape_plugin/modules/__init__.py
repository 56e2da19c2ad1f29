"""Parts that models and output layers are built from."""
