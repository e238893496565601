"""Rows of datasets: read, written in place, put back, compared with their checksums."""
