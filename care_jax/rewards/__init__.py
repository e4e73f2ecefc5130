"""Rewards: answer correctness and response format."""
