"""What kvd's daemon and its clients agree on: the stubs of kvd.v1 and the shared-memory layouts."""
