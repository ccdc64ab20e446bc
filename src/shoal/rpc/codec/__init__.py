"""Encoding of arguments and results: pickles, tensors, and plain values for restricted workers."""
