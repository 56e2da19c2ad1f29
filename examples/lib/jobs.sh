# For scripts that wait for something in the background; they source it.

# last_job: waits for the pipeline that was started last, in the background, and has its status. A signal to this shell, which
# would wait for the end of one in the foreground, ends the pipeline: its first process is stopped, and the others follow.
last_job() {
  local first status=0
  first=$(jobs -p %+)
  trap "kill $first 2>/dev/null || true; wait; exit 143" TERM HUP
  trap "kill $first 2>/dev/null || true; wait; exit 130" INT
  wait %+ || status=$?
  trap - TERM HUP INT
  return $status
}
