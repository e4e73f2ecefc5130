"""Standalone programs: data preparation, probing, gradients, repairs, the report, SmolLM2."""
