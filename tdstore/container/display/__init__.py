"""How a container is shown."""
