"""What outlives a stage: policy, weights, checkpoints, guards, the workdir's lock."""
