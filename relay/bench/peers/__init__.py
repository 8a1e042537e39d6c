"""Ours and others' servers under the same load on the same machine: what `scripts/bench_peers` runs.

find or build the servers     llama, vllm, ours; a peer that cannot be had is named with the reason, and the rest goes on
start them all                tournament, process
each load on each in turn     scenario, tournament; how quiet the machine was beside each run: quiet
medians of pairs, verdicts    pairing, verdict; where our own time went: whereabouts
a page, an object, a picture  table, result, picture
"""
