"""What a process does for the leases that it holds."""
