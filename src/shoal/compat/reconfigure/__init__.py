"""Torch's ``_reconfigure``: groups with changing members."""
