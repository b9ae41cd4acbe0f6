"""The package in projects and databases: its schema, its checks, its connections."""
