"""The members of a session: which processes join, which leave, and where they wait."""
