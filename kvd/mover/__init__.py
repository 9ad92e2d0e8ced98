"""The mover: one process per registered rank that copies between engine memory and the pool.

Control sees `process.MoverProcess`; everything else here runs in the child, which imports
numpy and nothing of gRPC.
"""
