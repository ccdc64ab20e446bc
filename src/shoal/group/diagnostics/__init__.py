"""Dumps of a group's state, and the search for ranks that disagree about the members of a subgroup."""
