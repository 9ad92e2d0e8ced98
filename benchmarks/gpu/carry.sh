#!/usr/bin/env bash
# Downloads the wheels that `make gpu-check` needs beside what a GPU machine has:
#
#   benchmarks/gpu/carry.sh [NAME==VERSION ...]     (PYTHON=3.12, the GPU machine's)
#
# into .whl/, which git ignores. The check unpacks them into a temporary folder and puts that
# before the machine's own packages. Versions are those of requirements/constraints.txt: they have
# no compiled parts, and run beside a newer grpcio and protobuf. Name more where more is missing.
set -euo pipefail
cd "$(dirname "$0")/../.."

readonly NAMES=(grpcio-health-checking grpcio-reflection grpcio-status googleapis-common-protos
  pytest-asyncio)

wanted=("$@")
for name in "${NAMES[@]}"; do
  wanted+=("$(grep -i "^$name==" requirements/constraints.txt)")
done
wanted+=(nvidia-ml-py) # any version: movers count their memory by it, where it is there
platforms=()
for number in 28 27 17; do platforms+=(--platform "manylinux_2_${number}_x86_64"); done
python=(python3)
[ -x .venv/bin/python ] && python=(.venv/bin/python)
mkdir -p .whl
"${python[@]}" -m pip download --quiet --no-deps --only-binary=:all: --dest .whl \
  --python-version "${PYTHON:-3.12}" --implementation cp "${platforms[@]}" \
  --platform manylinux2014_x86_64 "${wanted[@]}"
ls .whl
