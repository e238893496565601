"""Arrays as bytes: metadata, codecs, chunks gathered before they are written."""
