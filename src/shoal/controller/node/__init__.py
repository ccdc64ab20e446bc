"""The half of the mode that runs in a node's process; it does not import the master's half.

The master calls the functions of :mod:`.sessions`; :mod:`.execute` executes its log. ``functions``,
``history`` and ``loader`` are the counterparts of the master's modules with the same names.
"""
