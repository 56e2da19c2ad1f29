"""What a trained model scores."""
