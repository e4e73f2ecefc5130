"""Rewards: is an answer right, is a response well formed."""
