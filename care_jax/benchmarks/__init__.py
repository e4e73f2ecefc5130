"""Evaluation benchmarks: reading their releases, building prompts and scoring answers.

One module per benchmark, each with the same functions (see `suite`). The answer that they read is a
letter, a value, the text of an option, an answer span or a whole response. Scoring follows the
published rules. If those draw a random option, the answer is wrong here and counted as unparsable.
"""
