"""Trees of prompts and responses packed into rows of one length."""
