"""A store that a server of shoal keeps in its memory or on its disk, and its client."""
