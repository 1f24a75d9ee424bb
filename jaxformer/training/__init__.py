"""Training: receives batches and a `Model`, returns a state and records."""
