"""What vLLM's scheduler process does with kvd: lookups, stores, loads, one step a message."""
