"""Processes that the kit starts and ends."""
