"""Conversions from and to other formats."""
