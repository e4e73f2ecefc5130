"""The evaluation sets: how their releases are read, how they ask, and how they score.

One module for each, with the same few names (see `suite`). The scoring follows each benchmark's
published rules; where those draw a random option, the answer is wrong here and counted as
unparsable.
"""
