"""Several datasets read as one, concatenated along the first batch dimension."""
