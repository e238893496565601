"""`LazyStackedTensorDict`: elements of any container, stacked when they are read."""
