"""The update: log-probabilities over packed rows, the training step, the optimizer."""
