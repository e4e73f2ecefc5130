"""Programs beside training; each runs alone and none is imported."""
