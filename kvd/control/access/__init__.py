"""Who calls: the companion socket, peers, tenants, and everybody's share of what there is."""
