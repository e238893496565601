"""Writes as transactions: new datasets, changes in place, commits, and the keys that they use."""
