"""Engines over obstore and fsspec, and what they need: a loop, credentials, forks, conditional puts."""
