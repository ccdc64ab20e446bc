"""A store that a server of shoal keeps in memory or on disk, and its client."""
