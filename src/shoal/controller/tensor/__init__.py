"""Tensors on nodes as a device of torch: dispatch of operations, metadata, prediction of results."""
