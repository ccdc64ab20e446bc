"""The public interface of the mode: the master, places, streams, loaders, traces."""
