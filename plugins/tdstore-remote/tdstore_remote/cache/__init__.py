"""Caches of pages of remote objects, in memory and on disk."""
