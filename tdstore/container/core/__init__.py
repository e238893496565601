"""What every container is: batch dimensions, locks, names, keys, tensorclass hooks."""
