"""Managers of the models: each operation is a transaction of its own."""
