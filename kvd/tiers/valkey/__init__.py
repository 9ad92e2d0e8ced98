"""The tier that keeps blocks in Valkey: a cluster's memory, or one server's, shared by nodes.

Valkey's servers are processes of the site's, apart from the daemon. What leaves, and when, is
their business: `maxmemory` and its policy, and a time to live where one is configured. kvd asks,
and proves what it gets.
"""
