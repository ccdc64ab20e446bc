"""Connections between workers: directory, meeting, and the endpoint of the core."""
