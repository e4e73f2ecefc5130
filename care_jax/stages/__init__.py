"""One file per name in `config.stages`: cold start, RL, evaluation, export."""
