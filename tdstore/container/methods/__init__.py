"""Methods of every container: access, writing, structure, devices."""
