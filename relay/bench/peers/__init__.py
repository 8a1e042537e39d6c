"""Ours and others' servers under the same loads on the same machine: what `scripts/bench_peers` runs.

cache, llama, vllm, hf_model   peers, built or installed once; one that cannot be had is named with the reason, and the rest goes on
server, ours                   what is started, and ended with us
loads, rounds                  each load on each server in turn, round by round; how quiet the machine was beside each run
verdict, record, page          medians, ratios within rounds, targets; written as JSON, Markdown and a picture
"""
