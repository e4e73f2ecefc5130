"""Parses answers by kind: notation, quantities, relations, matrices, formulas."""
