"""A small LLM serving engine whose KV cache kvd keeps: the demo's and the tests' engine."""
