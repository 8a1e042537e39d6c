"""`python -m relay.gpu_check.pool_owner REHEARSE N_BLOCKS`: a pool of another process. Prints its handle; goes at end of input."""

import json
import sys

import msgspec

from relay.engine.cuda.pool import DevicePool
from relay.gpu_check.stage import Stage
from relay.gpu_check.transfer_speed import PROGRAMS, layout

if __name__ == "__main__":
    rehearse = sys.argv[1] == "1"
    stage = Stage(PROGRAMS, rehearse=rehearse)
    pool = DevicePool.create(layout(int(sys.argv[2]), rehearse), stage.runtime, 1)
    print(json.dumps(msgspec.to_builtins(pool.handle)), flush=True)
    sys.stdin.read()
