"""Values that are no tensors: one for a batch, or one per row."""
