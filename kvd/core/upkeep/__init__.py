"""What sessions, operators, time and restarts bring, in pieces where it is long."""
