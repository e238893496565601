"""Container state and primitives: batch dimensions, locks, names, keys, tensorclass hooks."""
