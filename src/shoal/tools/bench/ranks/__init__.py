"""The ranks of the contenders.

They run in the contender's own environment (those of MPI have neither torch nor click), so a module here
imports only what its engine needs.
"""
