"""Datasets and epochs for training: rows of a container in an order that resumes exactly."""
