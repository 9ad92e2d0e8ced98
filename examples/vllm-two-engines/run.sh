#!/usr/bin/env bash
# Two vLLM servers on one kvd daemon; README.md tells what one sees. Options: run.sh --help
set -euo pipefail
cd "$(dirname "$0")/../.."

.ci/venv demo bench
if [ -z "${KVD_VLLM_PYTHON:-}" ]; then
  .ci/venv vllm
fi
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
exec .venv/bin/python examples/vllm-two-engines/two_engines.py "$@"
