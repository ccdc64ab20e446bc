"""Common parts of the stores in Redis and etcd: URLs, TLS, and the connections of a job."""
