"""The members of a session: processes that join, ranks that leave, and the keys in the store for both."""
