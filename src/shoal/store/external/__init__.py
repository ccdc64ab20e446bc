"""What the stores on servers that are not part of shoal (Redis, etcd) have in common."""
