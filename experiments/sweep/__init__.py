"""Runs the arms of an experiment over seeds, tabulates and plots them. See `__main__`."""
