# The command of a pod: torchrun with the ranks' program in "$@", started in the folder $0.
#
# SIGTERM (an eviction, a deletion, the deadline) makes $STOP_FILE, which all ranks see. A program saves then, leaves
# {"outcome": "preempted"} in the attempt's outcome, and the pod exits with STOPPED, which counts as no failure.
mkdir -p "$RUN_DIR/control" "$RUN_DIR/logs" && cd "$0" || exit 1
[ -w "${HOME:-/nonexistent}" ] || export HOME=/tmp
outcome=$RUN_DIR/control/$RUN_ATTEMPT_ID.outcome
is_host=false
if [ "$JOB_COMPLETION_INDEX" = 0 ]; then
  is_host=true
  rm -f "$STOP_FILE" "$outcome"
fi
python3 -c AGENT --nnodes="$NNODES" --nproc-per-node="$NPROC_PER_NODE" --rdzv-backend=c10d \
  --rdzv-id="$RUN_ATTEMPT_ID" --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" \
  --rdzv-conf="is_host=$is_host,join_timeout=1800" --log-dir="$RUN_DIR/logs" --tee=3 "$@" &
ranks=$!
trap 'touch "$STOP_FILE"' TERM
while kill -0 $ranks 2>/dev/null; do
  wait $ranks
  code=$?
done
if [ $code != 0 ] && grep -qs '"preempted"' "$outcome"; then
  code=STOPPED
fi
exit $code
