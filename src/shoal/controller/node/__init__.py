"""The half of the mode that runs in the process of a node.

A master calls the functions of :mod:`.sessions`, and :mod:`.execute` does what its log says.  ``functions``,
``history``, ``loader`` and ``trace`` have the names of the master's modules whose other halves they are.
Nothing in here imports the master's half.
"""
