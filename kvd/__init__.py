"""kvd: a daemon that keeps the KV cache of LLM engines in host memory, outside the engines."""

__version__ = "0.1.0"
