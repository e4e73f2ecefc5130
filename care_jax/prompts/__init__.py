"""Prompts: chat template and tokens, images and their patches."""
