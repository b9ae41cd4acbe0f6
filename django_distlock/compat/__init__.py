"""The names of other lock packages, for code that comes from them."""
