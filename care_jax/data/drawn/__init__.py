"""Sources whose examples are drawn on demand."""
