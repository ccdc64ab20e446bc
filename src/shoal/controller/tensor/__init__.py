"""The torch device ``node``: dispatch of operations, tensor metadata, and prediction of results."""
