"""The ranks of the contenders.

They run in the contender's environment (MPI ranks have neither torch nor click), so each module imports only
what its engine needs.
"""
