"""Helpers for all modules: text, decoding, deadlines, nested values, releases of torch."""
