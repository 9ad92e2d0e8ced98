"""Adapters from particular engines to the engine-neutral scheduler and worker, one package each.

None is here yet. An adapter translates an engine's words (its request and block objects, its
hooks) and decides nothing: the step logic is in `kvd_client.scheduler`.
"""
