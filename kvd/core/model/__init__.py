"""What the machine knows, without a question to all of it: slots, rows, jobs, leases, tenants."""
