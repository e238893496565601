"""Entries that are more than a dense tensor."""
