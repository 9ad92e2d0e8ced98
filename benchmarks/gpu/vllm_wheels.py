"""vLLM for a GPU machine that has torch and Triton, and can fetch nothing: into .whl-vllm/.

    python -m benchmarks.gpu.vllm_wheels [--python 3.12]

vLLM's own wheel for GPUs is too large to be carried, for its compiled kernels. Its Python is 9 MB.
So a wheel is made of the Python of .venv-vllm's, with `vllm_parts` in place of what is compiled:
attention is then vLLM's Triton backend, and all else torch. What it imports and such a machine
does not have comes beside it, in the versions of .venv-vllm.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from benchmarks.gpu import places
from benchmarks.vllm.processes import vllm_python

PARTS = places.ROOT / "benchmarks" / "gpu" / "vllm_parts"
REPLACED = {
    "vllm/_C_stable_libtorch.py": "kernels.py",
    "vllm/vllm_flash_attn/__init__.py": "flash_attention.py",
    "vllm/vllm_flash_attn/flash_attn_interface.py": "flash_attention.py",
}
LEFT_OUT = re.compile(r"\.so$|\.pyc$|device_name=|\.(html|css|js|png|jpg)$")
BESIDE = PARTS / "beside.txt"  # what an engine imports, and a machine for PyTorch has not
GLIBC = (17, 24, 26, 27, 28, 31, 34)  # pip takes wheels of these names alone
ASKED = """
import importlib.metadata as metadata, pathlib, sys, vllm
print(pathlib.Path(vllm.__file__).parent, vllm.__version__)
for name in sys.argv[1:]: print(f"{name}=={metadata.version(name)}")
"""


def main() -> None:
    """Make the folder anew, and say how large it is."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--python", default="3.12", help="the GPU machine's")
    options = parser.parse_args()
    asked = [vllm_python(), "-c", ASKED, *BESIDE.read_text().split()]
    first, *wanted = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.split(
        "\n"
    )
    source, version = first.split(" ")
    folder = places.VLLM_WHEELS
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    make_wheel(Path(source), version, folder / f"vllm-{version}-py3-none-any.whl")
    download(list(filter(None, wanted)), options.python, folder)
    total = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{len(list(folder.iterdir()))} wheels, {total / 2**20:.0f} MiB, in {folder.name}/")


def make_wheel(source: Path, version: str, target: Path) -> None:
    """A wheel of a package's Python, with the parts that stand for what is compiled."""
    described = f"vllm-{version}.dist-info"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as wheel:
        for path in sorted(source.rglob("*")):
            name = path.relative_to(source.parent).as_posix()
            if path.is_file() and name not in REPLACED and not LEFT_OUT.search(name):
                wheel.write(path, name)
        for name, part in REPLACED.items():
            wheel.write(PARTS / part, name)
        wheel.writestr(
            f"{described}/METADATA", f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
        )
        wheel.writestr(
            f"{described}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        names = [*wheel.namelist(), f"{described}/RECORD"]
        wheel.writestr(f"{described}/RECORD", "".join(f"{name},,\n" for name in names))


def download(wanted: list[str], python: str, folder: Path) -> None:
    """Fetch these, as `name==version`, for another machine."""
    platforms = [f"manylinux_2_{number}_x86_64" for number in GLIBC]
    platforms += ["manylinux2014_x86_64", "manylinux1_x86_64"]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    told = [word for name in platforms for word in ("--platform", name)]
    told += ["--python-version", python, "--implementation", "cp", "--dest", str(folder)]
    subprocess.run([*pip, *told, *wanted], check=True)


if __name__ == "__main__":
    main()
