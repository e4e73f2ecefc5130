"""CARE: reinforcement learning for vision-language models that learns from failures."""

import os

# Only the tokenizers and templates of transformers are used, so its warning about a missing torch
# is switched off.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
