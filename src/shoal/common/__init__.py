"""Helpers that any module may use: text, decoding, deadlines, nested values, releases of torch."""
