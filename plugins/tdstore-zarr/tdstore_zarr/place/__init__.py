"""Where a store lies: folders, objects, memory, zip files; and the redo log of each."""
