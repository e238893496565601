"""Arrays as bytes: metadata, codecs, and the write buffer of chunks."""
