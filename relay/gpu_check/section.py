"""`python -m relay.gpu_check.section NAME [--rehearse]`: one section in a process of its own, for a kernel that goes wrong takes its
process's device with it. Each line out is what it found so far, as JSON; the last counts."""

import argparse
import importlib
import json
import os
import sys
import time
import traceback
from typing import Final

from relay.gpu_check.report import Found, Skip

MODULES: Final = {
    "device": "device",
    "kernels": "kernels_right",
    "sampling": "sampling_right",
    "graphs": "graphs_equal",
    "ipc": "ipc_protocol",
    "decode": "decode_step",
    "speed": "kernel_speed",
    "transfer": "transfer_speed",
    "server": "whole_server",
}


def _tell(found: Found) -> None:
    """So far."""
    print(json.dumps(found.to_json()), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=MODULES)
    parser.add_argument("--rehearse", action="store_true")
    given = parser.parse_args()
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    found, started = Found(given.name, on_row=_tell), time.monotonic()
    try:
        importlib.import_module(f"relay.gpu_check.{MODULES[given.name]}").run(found, given.rehearse)
        found.close()
    except ModuleNotFoundError as error:
        ours = (error.name or "").startswith("relay")
        found.status, found.note = ("failed", traceback.format_exc()) if ours else ("skipped", f"not installed: {error.name}")
    except Skip as error:
        found.status, found.note = "skipped", str(error)
    except Exception:
        found.status, found.note = "failed", traceback.format_exc()
    found.seconds = time.monotonic() - started
    _tell(found)
    return found.status == "failed"


if __name__ == "__main__":
    sys.exit(main())
