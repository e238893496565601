"""Replay buffers, and what they are made of: writers choose the slots to fill, samplers the slots to read."""
