"""`kvd replay`: what a policy would have found on a trace, by the daemon's own core."""
