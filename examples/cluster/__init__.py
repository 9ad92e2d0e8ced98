"""A cluster's store on this machine, to try a tier with: `make cluster-up`, `make cluster-down`."""
