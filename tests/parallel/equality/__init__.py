"""Training by shoal's DistributedDataParallel equals training by torch's over Gloo.

``case.py`` says what a case is; the other modules hold the cases by kind; ``runner.py`` trains each of
them with both wrappers in the same processes; ``test_equality.py`` compares.
"""
