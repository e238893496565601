"""Checkpoints: state dicts and safetensors files."""
