"""CARE: reinforcement learning for vision-language models that learns from failures."""

import os

# transformers serves tokenizers and templates here; that it has no torch needs no mention.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
