"""What must agree before two vLLM engines may share blocks."""
