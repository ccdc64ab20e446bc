"""TLS for connections, and the certificates for it."""
