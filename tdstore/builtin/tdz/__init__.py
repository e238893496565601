"""The `tdz` backend: one file for a whole dataset."""
