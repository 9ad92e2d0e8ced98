"""`kvd doctor`: what is wrong with a machine or a daemon, each with what to change."""
