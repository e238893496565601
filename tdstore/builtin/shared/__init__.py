"""The `shared` backend: memory that the processes of one machine share."""
