#!/usr/bin/env bash
# A run on TPU slices of a cluster that xpk made:
#
#   PROJECT=... ZONE=us-west4-a CLUSTER=... IMAGE=REGISTRY/care_jax:tpu TYPE=v5litepod-16 \
#       deploy/xpk.sh care --config=configs/qwen25vl_3b.py
#
# Once before: put the name of the bucket into deploy/xpk-storage.yaml. It is mounted at /runs, and the
# run's workdir is /runs/<name>. SLICES=2 asks for two slices.
set -euo pipefail

: "${PROJECT:?} ${ZONE:?} ${CLUSTER:?} ${IMAGE:?} ${TYPE:?}"
NAME=${1:?name of the workload}
shift
PLACE=(--project="$PROJECT" --zone="$ZONE" --cluster="$CLUSTER")
HERE=$(dirname "$0")

STORAGES=$(xpk storage list "${PLACE[@]}") # grep ends at the first match, and xpk could not write on
if ! grep --quiet --word-regexp care-runs <<<"$STORAGES"; then
  xpk storage attach care-runs "${PLACE[@]}" --type=gcsfuse --manifest="$HERE/xpk-storage.yaml" \
    --auto-mount=false --mount-point=/runs --readonly=false
fi

printf -v FLAGS ' %q' "$@"
# exec: the signal must reach Python. xpk restarts on 75 only if asked, and counts these restarts too.
xpk workload create "${PLACE[@]}" --workload="$NAME" --tpu-type="$TYPE" \
  --num-slices="${SLICES:-1}" --docker-image="$IMAGE" --storage=care-runs \
  --max-restarts=100 --restart-on-exit-codes=75 --termination-grace-period-seconds=180 \
  --env=HF_HOME=/runs/huggingface \
  --command="exec python -m care_jax.main --workdir=/runs/$NAME$FLAGS"
