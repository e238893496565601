"""Engines over obstore and fsspec, with their event loop, credentials, fork checks and conditional puts."""
