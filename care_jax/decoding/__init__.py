"""Rollouts: sampling, the continuous decoder, its schedule and queue, the reflected context."""
