"""Evaluation benchmarks: reading their releases, building prompts and scoring answers.

One module per benchmark, each with the same functions (see `suite`). Scoring follows the published
rules. If those draw a random option, the answer is wrong here and counted as unparsable.
"""
