#!/usr/bin/env bash
# Asks for a TPU slice of VMs, waits until it is there, and starts the run on all of its hosts.
#
#   PROJECT=... ZONE=us-west4-a TYPE=v5litepod-16 REPOSITORY=https://... BUCKET=... \
#       deploy/queued-resource.sh care --config=configs/qwen25vl_7b.py
#
# The bucket is mounted at /runs on every host, and the run's workdir is /runs/<name>. Each start
# brings the hosts' clone to REVISION (main). If the slice is taken away, the script asks for another
# one, and if the run was told to stop (75), it starts it again; both go on from the last checkpoint.
# When the run itself fails, the script ends and keeps the slice.
set -euo pipefail

: "${PROJECT:?} ${ZONE:?} ${TYPE:?} ${REPOSITORY:?} ${BUCKET:?}"
NAME=${1:?name of the queued resource}
shift
RUNTIME=${RUNTIME:-v2-alpha-tpuv5-lite}
TPU=(gcloud compute tpus --project="$PROJECT")

state() {
  "${TPU[@]}" queued-resources describe "$NAME" --zone="$ZONE" \
    --format="value(state.state)" 2>/dev/null || true
}

acquire() {
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
    sleep "${POLL:-30}"
  done
}

# shellcheck disable=SC2016  # expanded on the hosts
# What every host does; the images of TPU VMs have Python 3.10, so uv brings its own.
HOST='set -euo pipefail
export PATH="$HOME/.local/bin:$PATH" HF_HOME=/runs/huggingface
if ! command -v gcsfuse >/dev/null; then
  key=/usr/share/keyrings/cloud.google.asc
  curl -fsS https://packages.cloud.google.com/apt/doc/apt-key.gpg | sudo tee "$key" >/dev/null
  echo "deb [signed-by=$key] https://packages.cloud.google.com/apt gcsfuse-$(lsb_release -cs) main" |
    sudo tee /etc/apt/sources.list.d/gcsfuse.list >/dev/null
  sudo apt-get -qq -o DPkg::Lock::Timeout=300 update
  sudo apt-get -qq -o DPkg::Lock::Timeout=300 install --yes gcsfuse
fi
if ! mountpoint -q /runs; then
  sudo mkdir -p /runs
  sudo chown "$USER" /runs
  gcsfuse --implicit-dirs --metadata-cache-ttl-secs=0 --metadata-cache-negative-ttl-secs=0 \
    "$BUCKET" /runs
fi
command -v uv >/dev/null || curl -LsSf https://astral.sh/uv/install.sh | sh
[ -d care_jax ] || git clone --quiet "$REPOSITORY" care_jax
cd care_jax
git fetch --quiet --force "$REPOSITORY" "$REVISION"
git checkout --quiet --force --detach FETCH_HEAD
uv venv --quiet --allow-existing --python 3.12 .venv
uv pip install --quiet --python .venv --constraint constraints.txt --editable ".[tpu,data,wandb]"
export JAX_COMPILATION_CACHE_DIR=/runs/compilation_cache
exec .venv/bin/python -m care_jax.main'

printf -v GIVEN 'BUCKET=%q REPOSITORY=%q REVISION=%q' "$BUCKET" "$REPOSITORY" "${REVISION:-main}"
printf -v FLAGS ' %q' "--workdir=/runs/$NAME" "$@"
while true; do
  acquire
  status=0
  "${TPU[@]}" tpu-vm ssh "$NAME" --zone="$ZONE" --worker=all \
    --command="export $GIVEN; $HOST$FLAGS" || status=$?
  if [[ $status == 0 ]]; then exit; fi
  sleep "${SETTLE:-120}" # a slice that is taken away is ACTIVE for a moment, then SUSPENDING
  until [[ "$(state)" =~ ^(ACTIVE|SUSPENDED|FAILED|)$ ]]; do sleep "${POLL:-30}"; done
  if [[ $status != 75 && "$(state)" == ACTIVE ]]; then exit "$status"; fi
done
