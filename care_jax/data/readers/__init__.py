"""One reader per release format."""
