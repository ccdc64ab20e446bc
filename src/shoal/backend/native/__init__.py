"""The native backend: shared memory within a host, authenticated TCP between hosts."""
