"""A run beyond one stage: policy, weights, checkpoints, guards, the workdir's lock."""
