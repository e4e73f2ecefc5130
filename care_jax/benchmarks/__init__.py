"""Evaluation benchmarks: reading their releases, building prompts and scoring answers.

One module per benchmark, each with the same functions (see `suite`). Scoring follows the published
rules, with one exception: where they draw a random option, the answer is wrong and unparsable.
"""
