"""Dumps of a group's state, and the detection of different member lists of a subgroup."""
