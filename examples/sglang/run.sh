#!/usr/bin/env bash
# Two SGLang engines on one GPU machine that share their host cache:  examples/sglang/run.sh MODEL
#
# Wants sglang and kvd-client in the environment of `python`, and `kvd` on the path. The first
# engine computes a prompt and stores its pages; the second loads them.
set -euo pipefail

model=${1:?the model, as for --model-path}
home=$(mktemp -d)
pool=$(mktemp -d -p /dev/shm kvd-sglang-XXXX)
socket=$home/kvd.sock
pids=()
trap 'kill "${pids[@]}" 2>/dev/null || true; wait || true; rm -rf "$home" "$pool"' EXIT

kvd serve --socket "$socket" --pool-directory "$pool/pool" --pool-bytes "${POOL_BYTES:-8GiB}" &
pids+=($!)

await() { # the engine's port, until it serves
  until curl -sf "http://127.0.0.1:$1/health" >/dev/null; do
    for pid in "${pids[@]}"; do
      kill -0 "$pid" 2>/dev/null || { echo "kvd or an engine has ended; it says above why" >&2; exit 1; }
    done
    sleep 2
  done
}

prompt=$(printf 'The quick brown fox jumps over the lazy dog, number %d. ' $(seq 400))
for port in 30001 30002; do
  python -m sglang.launch_server --model-path "$model" --port "$port" --page-size 64 \
    --mem-fraction-static 0.4 --enable-hierarchical-cache --hicache-size 4 \
    --hicache-mem-layout page_first --hicache-storage-prefetch-policy wait_complete \
    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
      "backend_name": "kvd", "module_path": "kvd_client.integrations.sglang.backend",
      "class_name": "KvdHiCache", "interface_v1": 1, "allocator": "shm",
      "hicache_storage_pass_prefix_keys": true, "socket_path": "'"$socket"'"}' &
  pids+=($!)
  await "$port"
  for _ in 1 2; do # the second time each engine has the pages itself
    curl -s "http://127.0.0.1:$port/generate" -H 'Content-Type: application/json' \
      -d "{\"text\": \"$prompt\", \"sampling_params\": {\"max_new_tokens\": 8, \"temperature\": 0}}" |
      python -c 'import json, sys; print(json.load(sys.stdin)["meta_info"])'
  done
done
kvd status --socket "$socket"
