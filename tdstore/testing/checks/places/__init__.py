"""Tests of the kit about a place: how it is opened, and what becomes of the files there."""
