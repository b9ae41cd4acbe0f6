"""The tests: `./dev test` runs them against real servers."""
