"""Reads of rows of many leaves in one round of byte ranges."""
