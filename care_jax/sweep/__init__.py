"""Arms of an experiment times seeds: run, tabulated and drawn. See `__main__`."""
