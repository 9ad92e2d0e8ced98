"""Generated stubs of kvd.v1; see proto/generate.py."""
