"""The kit's tests, by subject."""
