"""Ahead-of-time compilation of a run's programs, without the target devices."""
