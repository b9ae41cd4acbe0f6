"""Stores that answer acquire, extend, release and read about a key: once, without waiting."""
