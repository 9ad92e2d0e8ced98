"""A block's way through its slot, and the namespaces, scopes and rows that it lies in."""
