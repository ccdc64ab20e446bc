"""A store in etcd."""
