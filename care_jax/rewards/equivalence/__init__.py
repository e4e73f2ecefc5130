"""Parses answers by kind: notation, sentences, options, numbers, relations, matrices, formulas."""
