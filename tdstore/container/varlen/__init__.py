"""Variable-length columns and nested tensors as leaves of a store."""
