"""The tier that keeps blocks in an object store that speaks S3: large, slow, shared by nodes.

What leaves, and when, is the bucket's business: its lifecycle rules. kvd asks, and proves what it
gets.
"""
