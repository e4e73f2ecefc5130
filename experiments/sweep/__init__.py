"""Runs the arms of an experiment over seeds, tabulates and plots the results. See `__main__`."""
