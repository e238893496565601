"""`TensorDict`: entries in memory, or live views of a store."""
