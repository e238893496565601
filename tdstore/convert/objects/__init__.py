"""Objects in memory: Python containers, arrays, pytrees, padded tensors, printed forms."""
