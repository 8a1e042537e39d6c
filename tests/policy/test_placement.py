"""Where attempts go."""

from relay.messages import Address
from relay.policy.cache_index import CacheIndex, hints
from relay.policy.placement import AnswerLengths, WorkerLoad, blocks_wanted, holding_all_of, may_compute_for, weigh_decode, weigh_prefill


def load(name: str, *amounts: int, n_blocks: int = 100, max_running: int = 4) -> WorkerLoad:
    worker = WorkerLoad(Address(name, 1), name, n_blocks, 16, max_running)
    for i, amount in enumerate(amounts):
        worker.place((f"r{i}", 1), amount)
    return worker


def nothing_cached(worker: WorkerLoad) -> int:
    return 0


def test_prefill_goes_where_fewest_tokens_wait() -> None:
    weighed = weigh_prefill([load("prefill/0", 500), load("prefill/1", 20, 30)], 100, nothing_cached)
    assert [candidate.address.actor for candidate in weighed] == ["prefill/1", "prefill/0"]


def test_equal_loads_go_by_name_not_by_chance() -> None:
    weighed = weigh_prefill([load("prefill/1"), load("prefill/0")], 100, nothing_cached)
    assert weighed[0].address.actor == "prefill/0"


def test_a_cached_prefix_draws_only_while_waiting_for_it_costs_less() -> None:
    """sglang#21199: prefix-aware placement must not pile everything onto one hot worker."""

    def cached(worker: WorkerLoad) -> int:
        return 800 if worker.worker == "prefill/0" else 0

    for other, most in ((0, 600), (1, 1601)):  # an idle one computes it for nobody's harm; where others wait it counts twice
        stays = weigh_prefill([load("prefill/0", most - 1), load("prefill/1", other)], 1000, cached)
        goes = weigh_prefill([load("prefill/0", most + 1), load("prefill/1", other)], 1000, cached)
        assert (stays[0].address.actor, goes[0].address.actor) == ("prefill/0", "prefill/1")


def test_what_prompts_will_leave_in_a_cache_is_coming_until_the_last_of_them_has_left() -> None:
    worker, keys = load("prefill/0"), [bytes([i]) * 16 for i in range(3)]
    worker.place(("a", 1), 48, keys)
    worker.place(("b", 1), 16, keys[:2])
    worker.leave(("a", 1))
    assert CacheIndex().n_blocks(keys, worker.coming) == 2
    worker.leave(("b", 1))
    worker.leave(("b", 1))
    assert worker.coming == {}


def test_what_should_have_come_and_does_not_another_has_to_compute() -> None:
    keys = [bytes([i]) * 16 for i in range(5)]
    for cached, amounts in ((b"", [0, 64 + 10, 10]), (hints(keys[:3]), [0, 16 + 10, 10]), (hints(keys), [0, 10, 10])):
        worker = load("prefill/0")
        worker.place(("first", 1), 64, keys[:4])
        for name in ("second", "third"):
            worker.place((name, 1), 10, keys, 4)
        worker.leave(("first", 1), CacheIndex(cached))
        assert [worker.placed.get((name, 1), 0) for name in ("first", "second", "third")] == amounts
        assert worker.load == sum(amounts)
        worker.leave(("second", 1))  # and then it is the third's
        assert worker.load == amounts[1]
        worker.leave(("third", 1))
        assert (worker.load, worker.coming) == (0, {})


def test_what_is_computed_is_no_load_but_still_comes() -> None:
    worker, keys = load("prefill/0"), [bytes(16)]
    worker.place(("a", 1), 48, keys)
    worker.computed(("a", 1))
    worker.computed(("b", 1))
    assert (worker.load, list(worker.coming)) == (0, [bytes(8)])
    worker.leave(("a", 1))
    assert (worker.load, worker.coming) == (0, {})


def test_what_is_coming_goes_on_from_what_is_there() -> None:
    keys = [bytes([i]) * 16 for i in range(4)]
    assert CacheIndex(hints(keys[:1])).n_blocks(keys, {keys[1][:8]: 1, keys[3][:8]: 1}) == 2


def test_decode_goes_where_the_largest_share_is_free() -> None:
    weighed = weigh_decode([load("decode/0", 10, n_blocks=20), load("decode/1", 30, n_blocks=100)], 5, nothing_cached)
    assert [candidate.address.actor for candidate in weighed] == ["decode/1", "decode/0"]


def test_what_a_decode_worker_has_cached_it_need_not_find_room_for_twice() -> None:
    weighed = weigh_decode([load("decode/0"), load("decode/1", 2)], 10, lambda w: 160 if w.worker == "decode/1" else 0)
    assert weighed[0].address.actor == "decode/1"


def test_no_room_and_no_place_mean_none() -> None:
    assert weigh_decode([load("decode/0", 98), load("decode/1", 1, 1, 1, 1)], 5, nothing_cached) == []


def test_what_a_worker_declined_counts_as_taken() -> None:
    worker = load("decode/0", 10)
    worker.withheld = 88
    assert weigh_decode([worker], 5, nothing_cached) == []


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
    assert [worker.address.actor for worker in holding_all_of(workers, 32)] == ["decode/0", "decode/1"]
    assert [worker.address.actor for worker in holding_all_of(workers, 48)] == ["decode/1"]
    assert not holding_all_of(workers, 49)


def test_answer_lengths_are_learnt() -> None:
    lengths = AnswerLengths(256)
    for n in range(15):
        lengths.saw(n)
    assert lengths.p90() == 256
    for n in range(100):
        lengths.saw(n)
    assert 80 <= lengths.p90() <= 95


def test_between_two_pools_of_both_roles_prompts_go_one_way() -> None:
    """Else each may be leased out to prompts that wait for room in the other."""
    first, second = load("both-0"), load("both-1")
    for worker in (first, second):
        worker.prefills = True
    assert may_compute_for(second, first)
    assert not may_compute_for(first, second)
    assert may_compute_for(first, first)


def test_a_worker_whose_role_it_is_computes_for_all_who_do_so_only_in_need() -> None:
    prefill, decode = load("a-prefill"), load("z-decode")
    prefill.prefills = True
    assert may_compute_for(prefill, decode)
    assert not may_compute_for(decode, prefill)
