"""Where attempts go."""

from relay.messages import Address
from relay.policy.placement import AnswerLengths, WorkerLoad, blocks_wanted, can_ever_fit, choose_decode, choose_prefill


def load(name: str, *amounts: int, n_blocks: int = 100, max_running: int = 4) -> WorkerLoad:
    worker = WorkerLoad(Address(name, 1), name, n_blocks, 16, max_running)
    for i, amount in enumerate(amounts):
        worker.place((f"r{i}", 1), amount)
    return worker


def table(*workers: WorkerLoad) -> dict[Address, WorkerLoad]:
    return {worker.address: worker for worker in workers}


def test_prefill_goes_where_fewest_tokens_wait() -> None:
    assert choose_prefill(table(load("prefill/0", 500), load("prefill/1", 20, 30)), None).worker == "prefill/1"


def test_equal_loads_go_by_name_not_by_chance() -> None:
    assert choose_prefill(table(load("prefill/1"), load("prefill/0")), None).worker == "prefill/0"


def test_decode_goes_where_the_largest_share_is_free() -> None:
    small, large = load("decode/0", 10, n_blocks=20), load("decode/1", 30, n_blocks=100)
    chosen = choose_decode(table(small, large), 5, None)
    assert chosen is large


def test_no_room_and_no_place_mean_none() -> None:
    full, busy = load("decode/0", 98), load("decode/1", 1, 1, 1, 1)
    assert choose_decode(table(full, busy), 5, None) is None


def test_what_a_worker_declined_counts_as_taken() -> None:
    worker = load("decode/0", 10)
    worker.withheld = 88
    assert choose_decode(table(worker), 5, None) is None


def test_round_robin_takes_turns() -> None:
    workers = table(load("prefill/0", 500), load("prefill/1"))
    assert [choose_prefill(workers, turn).worker for turn in range(4)] == ["prefill/0", "prefill/1"] * 2


def test_leaving_gives_back_exactly_what_was_taken() -> None:
    worker = load("decode/0", 10, 20)
    worker.leave(("r0", 1))
    worker.leave(("r0", 1))
    assert worker.load == 20


def test_reservation_counts_the_tokens_to_come() -> None:
    assert blocks_wanted(10, 1000, 100, 1.0, 16) == 7
    assert blocks_wanted(10, 3, 100, 1.0, 16) == 1
    assert blocks_wanted(16, 1000, 100, 0.0, 16) == 2  # the next token at least


def test_what_can_never_fit_is_known() -> None:
    workers = [load("decode/0", n_blocks=2), load("decode/1", n_blocks=3)]
    assert can_ever_fit(40, 8, workers)
    assert not can_ever_fit(40, 9, workers)


def test_answer_lengths_are_learnt() -> None:
    lengths = AnswerLengths(256)
    for n in range(15):
        lengths.saw(n)
    assert lengths.p90() == 256
    for n in range(100):
        lengths.saw(n)
    assert 80 <= lengths.p90() <= 95
