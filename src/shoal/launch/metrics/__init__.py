"""``--metrics``: counters of ranks and of the launcher, for Prometheus."""
