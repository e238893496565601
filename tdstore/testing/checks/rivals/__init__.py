"""Tests of the kit with other processes and threads: what they see, what they commit, how they end."""
