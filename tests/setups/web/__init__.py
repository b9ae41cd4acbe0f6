"""A small project that web servers serve."""
