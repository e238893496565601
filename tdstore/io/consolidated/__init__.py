"""Consolidated files: all leaves in one buffer, one file."""
