"""What Linux is asked and told: directories that are ours alone, signals, lists of numbers."""
