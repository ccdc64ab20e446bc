"""The commands, metadata and names that master and nodes share."""
