"""The containers that users hold."""
