"""What a trained model scores: with a cache, with dynamic evaluation, or as it is; scripts/ has the command lines."""
