"""What backends are made of: documents, files, locks, checksums, and engines over them."""
