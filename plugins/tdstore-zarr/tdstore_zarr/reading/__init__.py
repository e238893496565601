"""Rows of many leaves in one round of byte ranges."""
