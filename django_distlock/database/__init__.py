"""How statements reach a database: connections, dialects, server functions."""
