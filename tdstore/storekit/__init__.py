"""Building blocks for backends: documents, files, locks, checksums, and engines over them."""
