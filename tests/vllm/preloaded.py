"""What every engine of the tests imports on its way: the process that forks them has it already.

vLLM has the whole heap collected five times at an engine's start. What is frozen here is not looked
at again, and stays in memory that the forks share.
"""

from __future__ import annotations

import gc
import importlib

from torch._inductor import cpu_vec_isa

for _name in (
    "compressed_tensors",
    "tests.vllm.engine_process",
    "vllm.model_executor.models.gemma3",
    "vllm.model_executor.models.llama",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
):
    importlib.import_module(_name)
cpu_vec_isa.pick_vec_isa()  # which starts a compiler and a Python
gc.collect()
gc.freeze()
