"""Filters for the templates of this package."""
