"""Memory of GPUs, planned from what is free there."""

from pathlib import Path

import pytest

from relay.config import parse
from relay.engine.cuda.memory_plan import FAR_BYTES
from relay.errors import ConfigError
from relay.kernels.cuda_devices import Gpu
from relay.model.random_models import make_folder
from relay.plan import Plan, apart, make_plan

GIB = 1 << 30
ONE = Gpu(name="a GPU", free=130 * GIB, total=139 * GIB, peers=())
WORKERS = {
    "two": "  - {name: prefill, roles: [prefill], device: cuda, gpus: [0]}\n  - {name: decode, roles: [decode], device: cuda, gpus: [0]}\n",
    "one": "  - {name: engine, roles: [prefill, decode], device: cuda, gpus: [0]}\n",
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder("llama-3-8b", tmp_path_factory.mktemp("random"))


def plan(path: Path, workers: str, gpus: tuple[Gpu, ...] = (ONE,), engine: str = "{}") -> Plan:
    config = parse(f"model: {{source: somewhere, name: m}}\nengine: {engine}\nworkers:\n{workers}")
    return make_plan(config, path, 0, None, "", gpus)


def test_workers_of_one_gpu_share_what_is_free_and_what_else_they_take_comes_first(llama: Path) -> None:
    one, two = plan(llama, WORKERS["one"]), plan(llama, WORKERS["two"])
    for each, n in ((one, 1), (two, 2)):
        memories = [worker.memory for worker in each.workers if worker.memory is not None]
        assert len(memories) == n
        assert 0.89 * ONE.free < sum(memory.total for memory in memories) <= 0.9 * ONE.free
        assert all(memory.weights == 2 * 8_030_261_248 for memory in memories)
    assert one.gpu_bytes()[0] <= 0.9 * ONE.free
    assert two.max_context == 8192


def test_a_share_can_be_asked_for_and_a_number_is_taken_as_it_is(llama: Path) -> None:
    assert plan(llama, WORKERS["one"], engine="{gpu_memory_share: 0.5}").gpu_bytes()[0] <= 65 * GIB
    fixed = plan(llama, WORKERS["one"], engine="{kv_memory_mib: 2048}")
    assert [worker.pool.pool_bytes for worker in fixed.workers if worker.pool is not None] == [2 * GIB]


def test_without_a_gpu_to_ask_the_pool_is_what_a_cpu_gets(llama: Path) -> None:
    assert [worker.pool.pool_bytes for worker in plan(llama, WORKERS["one"], ()).workers if worker.pool is not None] == [GIB]


def test_what_has_no_room_is_refused_with_numbers(llama: Path) -> None:
    small = Gpu(name="a small GPU", free=16 * GIB, total=16 * GIB, peers=())
    with pytest.raises(ConfigError, match=r"a small GPU has 16384 MiB free, and 1 worker\(s\) take 1\d{4} MiB each beside the KV pool"):
        plan(llama, WORKERS["one"], (small,))
    with pytest.raises(ConfigError, match=r"GPU 0 has 133120 MiB free, and its workers take \d+; give them less kv_memory_mib"):
        plan(llama, WORKERS["two"], engine="{kv_memory_mib: 60000}")


def test_gpus_that_do_not_reach_each_other_are_found() -> None:
    some = tuple(Gpu(name="x", free=1, total=1, peers=peers) for peers in ((1,), (0, 2), (1,)))
    assert apart((0, 0), some) == ()
    assert apart((0, 1), some) == ()
    assert apart((1, 0, 2), some) == ((0, 2), (2, 0))
    assert apart((0, 7), some) == ()  # not here to be asked


def test_between_gpus_that_do_not_reach_each_other_kv_goes_through_the_host_and_takes_room_for_it(llama: Path) -> None:
    two = "  - {name: prefill, roles: [prefill], device: cuda}\n  - {name: decode, roles: [decode], device: cuda}\n"
    near = tuple(Gpu(name="a GPU", free=130 * GIB, total=139 * GIB, peers=(1 - number,)) for number in range(2))
    found = {name: plan(llama, two, gpus) for name, gpus in (("near", near), ("far", (ONE, ONE)))}
    assert found["near"].routes() == "straight into the other worker's pool"
    assert found["far"].routes().endswith("but through pinned memory of the host from GPU 0 to 1, 1 to 0")
    pools = {name: [worker.pool.pool_bytes for worker in each.workers if worker.pool is not None] for name, each in found.items()}
    for before, after in zip(pools["near"], pools["far"], strict=True):
        assert 0 <= before - after - FAR_BYTES < 8 << 20
    assert all(n_bytes <= 0.9 * ONE.free for n_bytes in found["far"].gpu_bytes().values())
    always = plan(llama, WORKERS["two"], engine="{peer_access: false}")
    assert always.routes() == "through pinned memory of the host (engine.peer_access is false)"
