"""Backends, which move the tensors of groups, and their registry.

``base`` is the interface, ``native`` is shoal's own engine, ``registry`` finds a backend by name.  Nothing is
imported here, so that a lookup does not load an engine.
"""
