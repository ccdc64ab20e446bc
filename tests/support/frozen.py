"""Imported by the fork server after all else, so that its forks do not look for garbage in torch."""

from .freezing import freeze

freeze()
