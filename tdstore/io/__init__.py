"""Moving data between stores: opening by location, row blocks of bounded memory, progress."""
