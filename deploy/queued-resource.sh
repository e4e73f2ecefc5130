#!/usr/bin/env bash
# Asks for a TPU slice of VMs, waits until it is there, and starts the run on all of its hosts.
#
#   PROJECT=... ZONE=us-west4-a TYPE=v5litepod-16 REPOSITORY=https://... BUCKET=... \
#       deploy/queued-resource.sh care --config=configs/qwen25vl_3b.py ...
#
# The bucket is mounted at /runs on every host, and the run's workdir is /runs/<name>. Each start
# brings the hosts' clone to REVISION (main), and reads the environment in /runs/keys.env, if it is
# there. SPOT= asks for a slice on demand. If the slice is taken away, the script asks for another
# one, and if the run was told to stop (75), it starts it again; both go on from the last checkpoint.
# When the run itself fails, the script ends and keeps the slice. A run outlives its ssh connections:
# a host on which one goes on starts no other.
set -euo pipefail

: "${PROJECT:?} ${ZONE:?} ${TYPE:?} ${REPOSITORY:?} ${BUCKET:?}"
NAME=${1:?name of the queued resource}
shift
RUNTIME=${RUNTIME:-v2-alpha-tpuv5-lite}
SPOT=${SPOT---spot}
TPU=(gcloud compute tpus --project="$PROJECT")
STATE=unknown

finish() {
  if [[ -n $STATE ]]; then
    echo "$NAME is kept and billed, whether its run has ended or not. To delete it:" >&2
    echo "  ${TPU[*]} queued-resources delete $NAME --zone=$ZONE --force" >&2
  fi
}
trap finish EXIT
trap 'exit 130' INT

# Sets STATE, which is empty if there is no such queued resource, and prints it when it has changed.
# `describe` fails both without a resource and without access; `list` only without access.
look() {
  local before=$STATE failures=0 lines
  until lines=$("${TPU[@]}" queued-resources list --zone="$ZONE" \
    --format="value(name.basename(),state.state)"); do
    failures=$((failures + 1))
    if [[ $failures == 10 ]]; then
      echo "error: the state of $NAME could not be read 10 times in a row" >&2
      exit 1
    fi
    sleep "${POLL:-30}"
  done
  STATE=$(awk -v name="$NAME" '$1 == name { print $2 }' <<<"$lines")
  if [[ $STATE != "$before" ]]; then
    echo "$(date +%T) $NAME: ${STATE:-not requested}" >&2
  fi
}

acquire() {
  local is_requested=
  while true; do
    look
    case $STATE in
      ACTIVE) return ;;
      SUSPENDED | FAILED)
        if [[ $is_requested ]]; then
          echo "error: $NAME is $STATE; run this again" >&2
          exit 1
        fi
        "${TPU[@]}" queued-resources delete "$NAME" --zone="$ZONE" --force --quiet
        ;;
      "")
        if [[ $is_requested ]]; then
          echo "error: $NAME was deleted; run this again to ask for another one" >&2
          exit 1
        fi
        STATE=requested
        "${TPU[@]}" queued-resources create "$NAME" --zone="$ZONE" --node-id="$NAME" \
          --accelerator-type="$TYPE" --runtime-version="$RUNTIME" ${SPOT:+"$SPOT"}
        is_requested=yes
        ;;
      DELETING | SUSPENDING) ;;
      *) is_requested=yes ;;
    esac
    sleep "${POLL:-30}"
  done
}

# What every host does.
#
# gcloud repeats the command on a host whose connection broke, up to 10 times, while the run goes on
# there. A second process with the number of a live one would end the run on all hosts. Hence the
# lock. What finds it taken waits; then a repetition returns the status of the run that it repeats
# (both have the same START), and another start returns 75, so that all hosts start together.
#
# The shell holds the lock, not the run, whose children may outlive it. It also returns a signal's
# end as 128 + n: ssh would say 255, which gcloud takes for a broken connection.
#
# The images of TPU VMs have Python 3.10, so uv brings its own.
# shellcheck disable=SC2016  # expanded on the hosts
HOST='set -euo pipefail
trap : HUP INT PIPE TERM # outlive the run
exec 9>>"$HOME/.care_run"
waited=
if ! flock --nonblock 9; then
  echo "$(hostname): a run goes on here; waiting until it ends"
  flock 9
  waited=yes
fi
read -r started status <"$HOME/.care_run" || true
if [ "$started" = "$START" ]; then exit "$status"; fi
if [ "$waited" ]; then exit 75; fi
echo "$START 75" >"$HOME/.care_run"
set +e
(
  set -e
  exec 9>&-
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
  if [ -f /runs/keys.env ]; then
    set -a
    . /runs/keys.env
    set +a
  fi
  command -v uv >/dev/null || curl -LsSf https://astral.sh/uv/install.sh | sh
  [ -d care_jax ] || git clone --quiet "$REPOSITORY" care_jax
  cd care_jax
  git fetch --quiet --force "$REPOSITORY" "$REVISION"
  git checkout --quiet --force --detach FETCH_HEAD
  uv venv --quiet --allow-existing --python 3.12 .venv
  uv pip install --quiet --python .venv --constraint constraints.txt --editable ".[tpu,data,wandb]"
  export JAX_COMPILATION_CACHE_DIR=/runs/compilation_cache
  exec .venv/bin/python -m care_jax.main "$@"
)
status=$?
echo "$START $status" >"$HOME/.care_run"
exit "$status"'

printf -v GIVEN 'BUCKET=%q REPOSITORY=%q REVISION=%q' "$BUCKET" "$REPOSITORY" "${REVISION:-main}"
printf -v FLAGS ' %q' "--workdir=/runs/$NAME" "$@"
num_lost=0
while true; do
  acquire
  status=0
  "${TPU[@]}" tpu-vm ssh "$NAME" --zone="$ZONE" --worker=all \
    --command="export $GIVEN START=$(date +%s.%N); set --$FLAGS; $HOST" \
    -- -o ServerAliveInterval=60 || status=$?
  if [[ $status == 0 ]]; then exit; fi
  sleep "${SETTLE:-120}" # a slice that is taken away is ACTIVE for a moment, then SUSPENDING
  look
  until [[ $STATE =~ ^(ACTIVE|SUSPENDED|FAILED|)$ ]]; do
    sleep "${POLL:-30}"
    look
  done
  if [[ -z $STATE ]]; then
    echo "error: $NAME was deleted; run this again to ask for another one" >&2
    exit "$status"
  fi
  # 255: gcloud could not connect again to a host, on which the run may go on.
  if [[ $status == 255 ]]; then num_lost=$((num_lost + 1)); else num_lost=0; fi
  if [[ $STATE == ACTIVE && $status != 75 ]] && ((num_lost == 0 || num_lost == 10)); then
    exit "$status"
  fi
done
