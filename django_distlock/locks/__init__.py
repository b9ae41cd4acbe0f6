"""Locks and leases, as callers see them."""
