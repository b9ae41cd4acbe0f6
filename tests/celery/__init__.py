"""Locked tasks, with real workers and brokers."""
