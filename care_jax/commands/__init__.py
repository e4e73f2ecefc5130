"""Standalone programs beside training: data preparation, probing, repairs, SmolLM2."""
