"""Work on many processes: running functions in them, and talking to them. Knows nothing of containers."""
