"""Trackers: TensorBoard, Weights & Biases and MLflow, and those of a config file."""
