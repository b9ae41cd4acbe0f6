"""Production set-ups: each with the real thing."""
