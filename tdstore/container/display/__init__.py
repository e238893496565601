"""Display of containers: text, HTML, print options."""
