"""vLLM's Python travels without what is compiled, and what stands for that does as much."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.vllm_wheels import PARTS, REPLACED, make_wheel


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Where a wheel of a package like vLLM was unpacked."""
    source = tmp_path / "vllm"
    for name, text in {
        "__init__.py": "RIGHT = 1\n",
        "_C.abi3.so": "compiled",
        "vllm_flash_attn/__init__.py": "raise ImportError('it is compiled')\n",
        "layers/configs/E=1,device_name=A_B.json": "{}",
        "layers/table.json": "{}",
    }.items():
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    wheel = tmp_path / "vllm-1.2.3-py3-none-any.whl"
    make_wheel(source, "1.2.3", wheel)
    unpacked = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--target", str(unpacked), str(wheel)], check=True)
    return unpacked


def output_of(code: str, environment: dict[str, str]) -> str:
    """What a python of its own prints; it must not fail."""
    command = [sys.executable, "-c", code]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    return told.stdout


def test_the_wheel_has_the_python_and_what_stands_for_the_rest(site: Path) -> None:
    found = {path.relative_to(site).as_posix() for path in (site / "vllm").rglob("*.*")}
    plain = {name for name in found if "__pycache__" not in name}
    assert plain == {"vllm/__init__.py", "vllm/layers/table.json", *REPLACED}
    asked = (
        "import importlib.metadata, vllm.vllm_flash_attn as flash;"
        "print(importlib.metadata.version('vllm'), flash.is_fa_version_supported(3))"
    )
    assert output_of(asked, {"PYTHONPATH": str(site)}).split() == ["1.2.3", "False"]


def test_the_operators_do_what_vllms_do() -> None:
    asked = f"""
import runpy, torch
runpy.run_path({str(PARTS / "kernels.py")!r})
torch.manual_seed(3)
values, out = torch.randn(5, 8), torch.empty(5, 4)
torch.ops._C.silu_and_mul(out, values)
torch.testing.assert_close(out, values[:, :4].sigmoid() * values[:, :4] * values[:, 4:])
assert torch.ops._C.cutlass_scaled_mm_supports_fp8(90) is False
assert not hasattr(torch.ops._C, "layer_norm")
"""
    output_of(asked, dict(os.environ))
