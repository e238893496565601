"""`PersistentTensorDict`: entries in a store, read and written by rows."""
