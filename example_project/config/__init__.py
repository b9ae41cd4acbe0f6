"""Settings and addresses of the example."""
