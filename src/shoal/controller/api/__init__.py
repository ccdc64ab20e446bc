"""The part of the mode that programs see: the master, places, streams, loaders, traces."""
