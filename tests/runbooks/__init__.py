"""The runbooks, done as they say: each incident is staged, confirmed, and ended."""
