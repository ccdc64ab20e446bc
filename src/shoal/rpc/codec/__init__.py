"""Encoding of arguments and results: pickles, tensors, and the form for restricted workers."""
