"""The gRPC edge: translates between kvd.v1 and the driver, and never decides."""
