"""Writes as transactions: new datasets, changes in place, commits, and their keys."""
