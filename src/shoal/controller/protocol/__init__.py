"""The vocabulary that master and nodes share."""
