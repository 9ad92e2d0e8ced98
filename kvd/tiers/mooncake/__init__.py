"""The tier that keeps blocks in a Mooncake Store: memory of a cluster's nodes, shared by them.

Mooncake's *master* knows which block lies where; its *nodes* (`mooncake_client`) lend the memory.
Both are processes of the site's, apart from the daemon, which lends none: so a daemon that is
started again finds what it stored, and so does any other. The bytes go straight between the pool's
slots and the nodes.
"""
