"""From and to what others hold."""
