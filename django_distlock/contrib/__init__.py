"""Integrations with other packages: one module for each, imported by the projects that use it."""
