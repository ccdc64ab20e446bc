"""Data channels: what moves tensors for a group, and the table of those that are known.

``base`` is the interface, ``native`` shoal's own engine, ``registry`` finds one by name.  Nothing is
imported here, so that a name can be looked up without loading an engine.
"""
