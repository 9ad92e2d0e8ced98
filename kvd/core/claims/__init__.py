"""What keeps blocks where they are: leases, hand-offs, and the memory of a request's prefix."""
