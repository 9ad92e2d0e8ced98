"""What stands for vLLM's compiled parts where a GPU machine has none; see vllm_wheels.py."""
