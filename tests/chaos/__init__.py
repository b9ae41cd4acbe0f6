"""Processes that take locks while everything around them fails: `python -m tests.chaos`."""
