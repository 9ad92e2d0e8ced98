"""What a vLLM worker does with kvd: its KV memory, its loads and stores."""
