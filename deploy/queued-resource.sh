#!/usr/bin/env bash
# Asks for a TPU slice of VMs, waits until it is there, and starts the run on all of its hosts.
#
#   PROJECT=... ZONE=us-west4-a TYPE=v5litepod-16 REPOSITORY=https://... WORKDIR=/mnt/runs/care \
#       deploy/queued-resource.sh care --config=configs/qwen25vl_7b.py
#
# WORKDIR must be storage that all hosts share, such as a mounted bucket. The same command after a
# preemption goes on from the last checkpoint; what ended is deleted first.
set -euo pipefail

: "${PROJECT:?} ${ZONE:?} ${TYPE:?} ${REPOSITORY:?} ${WORKDIR:?}"
NAME=${1:?name of the queued resource}
shift
RUNTIME=${RUNTIME:-v2-alpha-tpuv5-lite}
TPU=(gcloud compute tpus --project="$PROJECT")

state() {
  "${TPU[@]}" queued-resources describe "$NAME" --zone="$ZONE" \
    --format="value(state.state)" 2>/dev/null || true
}

case "$(state)" in
  SUSPENDED | FAILED)
    "${TPU[@]}" queued-resources delete "$NAME" --zone="$ZONE" --force --quiet
    ;;
esac
if [[ -z "$(state)" ]]; then
  "${TPU[@]}" queued-resources create "$NAME" --zone="$ZONE" --node-id="$NAME" \
    --accelerator-type="$TYPE" --runtime-version="$RUNTIME" --spot
fi
until [[ "$(state)" == ACTIVE ]]; do
  case "$(state)" in
    SUSPENDED | FAILED) echo "error: $NAME is $(state); run this again" >&2; exit 1 ;;
  esac
  sleep 30
done

printf -v FLAGS ' %q' "$@"
"${TPU[@]}" tpu-vm ssh "$NAME" --zone="$ZONE" --worker=all --command="
  set -e
  [ -d care_jax ] || git clone $REPOSITORY care_jax
  cd care_jax
  python3 -m venv .venv
  .venv/bin/pip install --quiet --editable '.[tpu]'
  exec .venv/bin/python -m care_jax.main --workdir=$WORKDIR $FLAGS"
