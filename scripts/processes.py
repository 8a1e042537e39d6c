"""CPU seconds and memory of each process of a server, before and after a load: for `scripts/measure_streams`."""

import json
import os
import sys
import urllib.request
from pathlib import Path

url, folder, when = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
with urllib.request.urlopen(url + "/admin/workers") as answer:
    pids = {row["worker"]: row["pid"] for row in json.load(answer)["workers"]}
now = {}
for worker, pid in pids.items():
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    anonymous = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("RssAnon:"))
    now[worker] = ((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), int(anonymous.split()[1]) / 1024)
if when == "before":
    (folder / "before.json").write_text(json.dumps(now))
    sys.exit()
before = json.loads((folder / "before.json").read_text())
run = json.loads((folder / "run.json").read_text())
tokens = run["output_tokens"]
speed, ttft_ms = run["output_tokens_per_s"], run["ttft_ms"]["p50"]
requests = run["requests"]
print(f"{requests['sent']} requests, {requests['failed']} failed, {tokens} tokens, {speed:.0f} tokens/s, TTFT p50 {ttft_ms:.0f} ms")
for worker, (cpu_s, mib) in now.items():
    cpu_before_s, mib_before = before[worker]
    us = 1e6 * (cpu_s - cpu_before_s) / tokens
    print(f"{worker:<12} {us:6.1f} us of CPU per token, {mib_before:.0f} MiB before, {mib:.0f} MiB after")
