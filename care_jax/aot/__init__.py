"""A run's programs compiled ahead of time for devices that are not there."""
