"""What only the Redis backend promises; the contract suite has what all backends do."""
