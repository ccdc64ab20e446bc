"""Torch's ``_reconfigure``: groups whose members change."""
