"""Locks for packages that bring work of their own: one module for each, imported by its users."""
