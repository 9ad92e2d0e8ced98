"""Make the stubs of `proto/kvd/v1` in `client/src/kvd_proto/v1`: the only way they are made.

protoc writes `from kvd.v1 import …`, which the daemon's own package `kvd` would shadow, so
every such import is rewritten to `kvd_proto.v1`. Run with grpcio-tools 1.76 (gencode 6.31),
which loads on protobuf 6.33 and 7; stubs of a newer release don't load on 6.33.

    python proto/generate.py            write the stubs
    python proto/generate.py --check    exit 1 if the stubs differ from what would be written
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent
OUT = ROOT.parent / "client" / "src" / "kvd_proto" / "v1"
IMPORT = re.compile(r"^from kvd\.v1 import", re.MULTILINE)


def generate(into: Path) -> dict[str, str]:
    """Return file name → text of every stub, made in the scratch folder `into`."""
    protos = sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("kvd/v1/*.proto"))
    well_known = resources.files("grpc_tools") / "_proto"
    args = [
        "protoc",
        f"-I{ROOT}",
        f"-I{well_known}",
        f"--python_out={into}",
        f"--pyi_out={into}",
        f"--grpc_python_out={into}",
        *protos,
    ]
    if protoc.main(args) != 0:
        raise SystemExit("protoc failed; see above")
    stubs = {}
    for made in sorted((into / "kvd" / "v1").iterdir()):
        text = IMPORT.sub("from kvd_proto.v1 import", made.read_text())
        if not made.name.endswith("_grpc.py") or "Service" in text:
            stubs[made.name] = text
    stubs["__init__.py"] = '"""Generated stubs of kvd.v1; see proto/generate.py."""\n'
    return stubs


def main() -> int:
    """Write the stubs, or with --check compare them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare; exit 1 on a difference")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as scratch:
        stubs = generate(Path(scratch))
    here = {p.name: p.read_text() for p in OUT.glob("*.py*")} if OUT.exists() else {}
    if check:
        differing = sorted(n for n in stubs.keys() | here.keys() if stubs.get(n) != here.get(n))
        for name in differing:
            print(f"client/src/kvd_proto/v1/{name} differs; run: python proto/generate.py")
        return 1 if differing else 0
    OUT.mkdir(parents=True, exist_ok=True)
    for stale in here.keys() - stubs.keys():
        (OUT / stale).unlink()
    for name, text in stubs.items():
        (OUT / name).write_text(text)
    print(f"{len(stubs)} files in {OUT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
