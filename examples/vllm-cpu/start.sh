#!/bin/sh
# vLLM replicas of a tiny model with random weights, on the CPU: "start.sh 1" on port 8001, "start.sh 2" on 8002.
#
# VENV_VLLM: an environment with vLLM (default: the one that tests/vllm/install.sh makes in the project's folder).
# MODEL: any model folder or Hugging Face id; the default is the simulation's, which has a tokenizer and no weights.
set -eu
NUMBER=${1:?which one? start.sh 1, start.sh 2, ...}
HERE=$(cd "$(dirname "$0")" && pwd)
ROOT=$(cd "$HERE/../.." && pwd)
VENV_VLLM=${VENV_VLLM:-$ROOT/.venv-vllm}
if [ -z "${MODEL:-}" ]; then
    MODEL=$ROOT/litellm_prefix_router/sim/assets/tiny
    LOAD="--load-format dummy"
    export HF_HUB_OFFLINE=1
fi
[ -x "$VENV_VLLM/bin/vllm" ] || { echo "no vLLM in $VENV_VLLM: run tests/vllm/install.sh $VENV_VLLM first" >&2; exit 1; }
export VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 VLLM_HOST_IP=127.0.0.1 VLLM_CPU_KVCACHE_SPACE=1
SOCKETS=${TMPDIR:-/tmp}
CORES=$(nproc 2>/dev/null || echo 1)

# One core each, where there are several: engines that spin on the same one are several times slower.
export VLLM_CPU_OMP_THREADS_BIND=$(((NUMBER - 1) % CORES))
# Events hold token ids: here they stay on this machine. Between machines the endpoints are "tcp://*:5557" and
# "tcp://*:5558", inside a network of your own.
EVENTS='{"enable_kv_cache_events": true, "publisher": "zmq",
  "endpoint": "ipc://'$SOCKETS/vllm-events-$NUMBER'", "replay_endpoint": "ipc://'$SOCKETS/vllm-replay-$NUMBER'"}'
exec "$VENV_VLLM/bin/vllm" serve "$MODEL" ${LOAD:-} --served-model-name tiny \
    --host 127.0.0.1 --port "800$NUMBER" --dtype bfloat16 --max-model-len 2048 --enforce-eager \
    --block-size 32 --num-gpu-blocks-override 512 \
    --enable-prefix-caching --enable-prompt-tokens-details --kv-events-config "$EVENTS"
