"""One gRPC servicer a file: it reads the message, calls, and says the answer."""
