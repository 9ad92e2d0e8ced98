"""Adapters for particular engines, one package each, and beside them what these share.

An adapter translates an engine's words: its request and block objects, its hooks. vLLM keeps its
own scheduler logic, SGLang asks and waits (`kvd_client.batches`); all else stands on the
engine-neutral parts of `kvd_client`.
"""
