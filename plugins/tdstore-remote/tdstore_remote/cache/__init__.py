"""Pages of remote objects, in memory and on disk."""
