# For scripts that measure: start a server on a free port and stop it again; say on what machine. Sourced, from the root of the repository.

folder="$(mktemp -d)"
server=""
stop() {
  [ -z "$server" ] || kill -TERM "$server" 2>/dev/null && wait "$server" 2>/dev/null || true
  server=""
}
trap 'stop; rm -rf "$folder"' EXIT

# Leaves the URL of a server that is ready in $url. The port is free because the system chose it.
start() {
  : >"$folder/log"
  .venv/bin/relay serve "$1" --bind 127.0.0.1:0 >"$folder/log" 2>&1 &
  server=$!
  url=""
  for _ in $(seq 1200); do
    url="$(sed -n 's/.* on \(http:[^ ]*\), .*/\1/p' "$folder/log" | head -n 1)"
    [ -n "$url" ] && .venv/bin/python -c 'import sys, urllib.request as u; u.urlopen(sys.argv[1] + "/readyz", timeout=5)' "$url" 2>/dev/null && return
    kill -0 "$server" 2>/dev/null || break
    sleep 0.1
  done
  echo "$0: $1 does not become ready:" >&2
  cat "$folder/log" >&2
  exit 1
}

# One line: cores, load, date, commit.
facts() {
  local cpu commit
  cpu="$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)"
  commit="$(git rev-parse --short HEAD 2>/dev/null || echo 'no git')"
  [ -z "$(git status --porcelain --untracked-files=no 2>/dev/null)" ] || commit="$commit with local changes"
  echo "$(nproc) cores of ${cpu:-unknown}, load before $(cut -d ' ' -f 1 /proc/loadavg), $(date -u +%Y-%m-%d), commit $commit;"
}
