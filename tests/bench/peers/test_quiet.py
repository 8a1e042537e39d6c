"""What makes a machine not quiet."""

import msgspec

from relay.bench.peers.quiet import Jiffies, Quietness, Reference, Sweep, judge, parse_jiffies, with_reasons
from tests.bench.peers.readings import REFERENCE, quietness

STAT = "cpu  1000 20 300 50000 40 6 7 80 5 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n"


def judged(*, busy_s: float, ours_s: float, steal_s: float = 0.0) -> Quietness:
    return judge(
        Jiffies(100.0, 50.0, 1.0),
        Jiffies(110.0, 50.0 + busy_s, 1.0 + steal_s),
        ours_s=ours_s,
        idle_peers_s=0.2,
        cores=2,
        loads=(0.1, 0.2),
        references=(REFERENCE, REFERENCE),
    )


def test_busy_time_leaves_idle_and_steal_out_and_counts_guests_once() -> None:
    found = parse_jiffies(STAT, 7.0)
    ticks = (1000 + 20 + 300 + 6 + 7) / found.busy_s
    assert found == Jiffies(7.0, 1333 / ticks, 80 / ticks)


def test_what_is_not_ours_is_of_others() -> None:
    found = judged(busy_s=15.0, ours_s=12.0)
    assert (found.others_share, found.idle_peers_share) == (0.15, 0.01)
    assert judged(busy_s=15.0, ours_s=15.1).others_share == 0.0


def test_a_quiet_machine_has_no_reasons() -> None:
    assert with_reasons(judged(busy_s=15.0, ours_s=14.9), 29.0, 12.5).quiet


def test_each_kind_of_noise_is_named() -> None:
    noisy = with_reasons(judged(busy_s=15.0, ours_s=12.0, steal_s=1.0), 20.0, 24.0)
    assert noisy.reasons == [
        "other processes took 15% of the cores",
        "the hypervisor stole 5%",
        "the reference spin took 1.50 times its best",
        "reading memory took 2.00 times its best",
    ]


def test_the_slower_of_the_two_references_counts() -> None:
    slow = Reference(spin_ms=45.0, sweep_gb_per_s=12.0, run_delay_share=0.3)
    assert not with_reasons(msgspec.structs.replace(quietness(), after=slow), 30.0, 12.0).quiet


def test_the_reference_work_is_measured() -> None:
    found = Sweep().measure()
    assert found.spin_ms > 0
    assert found.sweep_gb_per_s > 0
