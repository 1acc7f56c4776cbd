"""What is let in before its body is read, and what it is charged afterwards."""

from __future__ import annotations

import pytest

from tessera.errors import Overloaded
from tessera.frontend.admission.room import RESPONSES_IN_FLIGHT, Admission, Capacity, Room, Ticket


class Workers:
    """What the workers say that they take."""

    def __init__(
        self,
        tokens: int = 10_000,
        units: int = 100,
        requests: int = 1000,
        response_bytes: int = 1 << 30,
        pairs: bool = False,
    ) -> None:
        self.tokens, self.units = tokens, units
        capacity = Capacity(lambda: self.tokens, lambda: self.units, unknown=5000)
        self.admission = Admission(max_requests=requests, max_response_bytes=response_bytes)
        self.room = self.admission.open_room("m", capacity, pairs=pairs)

    def fill(
        self, client: str = "", tokens: int = 100, units: int = 0, response_bytes: int = 0
    ) -> list[Ticket]:
        tickets = []
        while True:
            try:
                ticket = self.admission.enter(client)
            except Overloaded as error:
                assert error.retry_after
                return tickets
            try:
                ticket.charge(tokens, units, response_bytes)
            except Overloaded:
                ticket.close()
                return tickets
            tickets.append(ticket)


def close(tickets: list[Ticket]) -> None:
    for ticket in tickets:
        ticket.close()


def test_requests_are_let_in_up_to_what_the_workers_take() -> None:
    workers = Workers()
    tickets = workers.fill()
    assert len(tickets) == 100 and workers.room.tokens.used == 10_000
    close(tickets)
    assert (workers.admission.requests.used, workers.room.tokens.used, workers.room.units.used) == (0, 0, 0)


def test_units_are_counted_as_well() -> None:
    workers = Workers()
    tickets = workers.fill(tokens=10, units=10)
    assert len(tickets) == 10 and workers.room.units.used == 100
    close(tickets)


def test_the_bytes_of_answers_are_counted_as_well() -> None:
    workers = Workers(response_bytes=1000)
    tickets = workers.fill(tokens=10, response_bytes=1000)
    assert len(tickets) == RESPONSES_IN_FLIGHT
    assert workers.admission.answers.used == RESPONSES_IN_FLIGHT * 1000
    late = workers.admission.enter("")
    with pytest.raises(Overloaded, match="bytes of answers in flight"):
        late.charge(10, 0, 1)
    late.close()
    tickets.pop().close()
    assert len(workers.fill(tokens=10, response_bytes=500)) == 2


def test_a_full_service_refuses_at_the_door() -> None:
    workers = Workers()
    tickets = workers.fill()
    with pytest.raises(Overloaded, match="tokens in flight"):
        workers.admission.enter("")
    tickets.pop().close()
    tickets.append(workers.admission.enter(""))
    close(tickets)


def test_a_key_over_its_share_is_told_so() -> None:
    workers = Workers()
    greedy = workers.fill("greedy")
    held = sum(ticket._tokens for ticket in greedy)
    said = rf"^this API key's share of the service is used \({held} of \d+ tokens in flight\)$"
    with pytest.raises(Overloaded, match=said):
        workers.admission.enter("greedy")
    # There is room for others, until there is none.
    tickets = workers.fill("modest")
    assert tickets
    tickets += workers.fill("")
    with pytest.raises(Overloaded, match=r"^the service is full \(10000 of 10000 tokens in flight\)$"):
        workers.admission.enter("greedy")
    close(greedy + tickets)


def test_the_number_of_requests_is_bounded_too() -> None:
    workers = Workers(requests=3)
    assert len(workers.fill(tokens=1)) == 3
    with pytest.raises(Overloaded, match=r"^the service is full \(3 of 3 requests in flight\)$"):
        workers.admission.enter("")


def test_a_request_of_any_size_gets_in_when_there_is_room() -> None:
    workers = Workers()
    small = workers.admission.enter("")
    small.charge(100, 0, 0)
    large = workers.admission.enter("")
    large.charge(10_000_000, 5000, 0)
    assert workers.room.tokens.used == 100 + 10_000 // 4 and workers.room.units.used == 100 // 4
    close([small, large])
    assert workers.room.tokens.used == workers.room.units.used == 0


def test_capacity_follows_the_workers_and_outlives_them() -> None:
    workers = Workers(tokens=0)
    assert len(workers.fill()) == 50
    workers.tokens = 20_000
    assert len(workers.fill()) == 150
    workers.tokens = 0
    assert workers.fill() == []
    assert workers.room.tokens.used == 20_000


def test_workers_that_become_slower_leave_other_keys_the_room_that_one_left_them() -> None:
    workers = Workers(tokens=100_000)
    greedy = workers.fill("greedy")
    assert workers.room.tokens.used == 80_000
    workers.tokens = 75_000
    assert not workers.fill("greedy")
    modest = workers.fill("modest")
    assert len(modest) == 1
    assert workers.admission.refusal("another") is None
    close(greedy + modest)


def test_a_small_body_is_not_taken_for_a_large_request() -> None:
    workers = Workers(tokens=100_000)
    first = workers.admission.enter("", 3000)
    first.charge(10_000, 0, 0)
    first.close()
    waiting = [workers.admission.enter("", 2400) for _ in range(100)]
    assert workers.room.tokens.used == 100 * 600
    close(waiting)


def test_a_small_body_of_pairs_is_taken_for_what_those_before_it_cost() -> None:
    """A query of 300 tokens with each of 30 short documents, in 3 KB."""
    workers = Workers(tokens=100_000, pairs=True)
    ticket = workers.admission.enter("", 3000)
    assert workers.room.tokens.used == 64
    ticket.charge(10_000, 0, 0)
    ticket.close()
    waiting = [workers.admission.enter("", 2400) for _ in range(10)]
    assert workers.room.tokens.used == 10 * 10_000
    with pytest.raises(Overloaded):
        workers.admission.enter("", 2400)
    close(waiting)


def test_bodies_of_other_lengths_say_nothing_of_what_a_request_costs() -> None:
    workers = Workers(tokens=100_000)
    for body_bytes, tokens in ((100_000, 3000), (500, 20)):
        ticket = workers.admission.enter("", body_bytes)
        ticket.charge(tokens, 0, 0)
        ticket.close()
    waiting = [workers.admission.enter("", 90_000)]
    assert workers.room.tokens.used == 3000
    waiting.append(workers.admission.enter("", 400))
    assert workers.room.tokens.used == 3020
    close(waiting)


def test_one_request_teaches_what_the_next_one_costs_and_ten_what_has_changed() -> None:
    workers = Workers(tokens=100_000)
    for tokens in (1600, *10 * [200]):
        ticket = workers.admission.enter("", 8000)
        ticket.charge(tokens, 0, 0)
        ticket.close()
        if tokens == 1600:
            close([workers.admission.enter("", 8000)])
            waiting = [workers.admission.enter("", 8000)]
            assert workers.room.tokens.used == 1600
            close(waiting)
    waiting = [workers.admission.enter("", 8000)]
    assert workers.room.tokens.used < 2 * 200
    close(waiting)


def test_a_guess_is_no_larger_than_what_a_request_is_charged() -> None:
    workers = Workers()
    ticket = workers.admission.enter("")
    ticket.charge(1_000_000, 0, 0)
    ticket.close()
    waiting = [workers.admission.enter("") for _ in range(4)]
    assert workers.room.tokens.used == 10_000
    close(waiting)


def test_a_request_is_taken_to_cost_what_those_before_it_did() -> None:
    workers = Workers(tokens=100_000)
    close(workers.fill(tokens=1000))
    waiting = []
    with pytest.raises(Overloaded):
        while True:
            waiting.append(workers.admission.enter(""))
    assert 100 <= len(waiting) < 120
    close(waiting)


class TwoModels:
    """Two models with 10,000 tokens each, 100 requests each."""

    def __init__(self) -> None:
        self.admission = Admission(max_requests=100, max_response_bytes=1 << 30)
        capacity = [Capacity(lambda: 10_000, lambda: 100, unknown=1) for _ in range(2)]
        self.one, self.other = map(self.admission.open_room, ("one", "other"), capacity)

    def fill(self, room: Room, tokens: int) -> list[Ticket]:
        tickets: list[Ticket] = []
        while True:
            try:
                ticket = self.admission.enter("")
            except Overloaded:
                return tickets
            try:
                ticket.enter(room)
                ticket.charge(tokens, 0, 0)
            except Overloaded:
                ticket.close()
                return tickets
            tickets.append(ticket)


@pytest.mark.parametrize(("tokens", "most"), [(1000, 10), (1, 100)], ids=["tokens", "requests"])
def test_a_flood_for_one_model_refuses_nobody_who_asks_another(tokens: int, most: int) -> None:
    models = TwoModels()
    flood = models.fill(models.one, tokens)
    assert len(flood) == most and models.one.tokens.used == most * tokens
    # Heads of more of them are read before it is known whose they are, and hold no room of the other's.
    heads = [models.admission.enter("") for _ in range(50)]
    for head in heads:
        with pytest.raises(Overloaded):
            head.enter(models.one)
        head.close()
    others = models.fill(models.other, tokens)
    assert len(others) == most
    close(flood + others)
    assert (models.admission.requests.used, models.one.tokens.used, models.other.tokens.used) == (0, 0, 0)


def test_a_head_is_refused_once_every_model_is_full() -> None:
    models = TwoModels()
    full = models.fill(models.one, 1000) + models.fill(models.other, 1000)
    with pytest.raises(Overloaded):
        models.admission.enter("")
    full.pop().close()
    close([*full, models.admission.enter("")])


def test_a_room_is_empty_once_its_last_request_has_left() -> None:
    models = TwoModels()
    first, second = (models.admission.enter("") for _ in range(2))
    first.enter(models.one)
    second.enter(models.one)
    assert models.one.requests.used == 2
    first.close()
    assert models.one.requests.used == 1
    # It goes to the other model's room.
    second.enter(models.other)
    assert (models.one.requests.used, models.other.requests.used) == (0, 1)
    second.close()
    assert models.other.requests.used == 0
    models.admission.close_room(models.one)
    ticket = models.admission.enter("")
    assert models.other.tokens.used > 0
    ticket.close()


@pytest.mark.parametrize("body_bytes", [None, 40, 4_000, 40_000])
def test_what_is_said_of_a_refusal_is_what_entering_raises(body_bytes: int | None) -> None:
    several, single = TwoModels(), Workers(requests=150)
    refused = 0

    def compare(admission: Admission) -> None:
        nonlocal refused
        for client in ("", "a", "b"):
            said = admission.refusal(client, body_bytes)
            try:
                admission.enter(client, body_bytes).close()
            except Overloaded as error:
                assert said is not None
                assert (said.message, said.retry_after) == (error.message, error.retry_after)
                refused += 1
            else:
                assert said is None

    held: list[Ticket] = []
    for tokens in (1000, 10, 1):
        for client in ("a", "b", ""):
            held += single.fill(client, tokens)
            compare(single.admission)
        for room in (several.one, several.other):
            held += several.fill(room, tokens)
            compare(several.admission)
    assert refused
    close(held)
    compare(single.admission)
    compare(several.admission)


@pytest.mark.parametrize("models", [1, 2])
def test_a_key_leaves_others_their_requests(models: int) -> None:
    """Also those whose bodies are still to come, which have few tokens, and of several models no room yet."""
    workers = Workers(tokens=1_000_000, requests=100 // models)
    if models == 2:
        workers.admission.open_room("n", Capacity(lambda: 1_000_000, lambda: 100, unknown=5000))
    tickets: list[Ticket] = []

    def fill(client: str) -> int:
        before = len(tickets)
        with pytest.raises(Overloaded) as refused:
            while True:
                tickets.append(workers.admission.enter(client, 4))
        assert "requests in flight" in refused.value.message
        return len(tickets) - before

    assert fill("greedy") == 80
    with pytest.raises(Overloaded, match=r"this API key's share of the service is used \(80 of 80 requests"):
        workers.admission.enter("greedy", 4)
    assert fill("modest") >= 15
    fill("")
    assert workers.admission.requests.used == 100
    with pytest.raises(Overloaded, match=r"^the service is full \(100 of 100 requests in flight\)$"):
        workers.admission.enter("third", 4)
    close(tickets)
    assert workers.admission.requests.used == workers.room.requests.used == 0


def test_an_answer_that_is_not_read_counts_and_takes_no_room() -> None:
    workers = Workers()
    ticket = workers.admission.enter("a")
    ticket.charge(100, 1, 1000)
    ticket.leave_room()
    assert (workers.room.requests.used, workers.room.tokens.used, workers.room.units.used) == (0, 0, 0)
    assert (workers.admission.requests.used, workers.admission.answers.used) == (1, 1000)
    ticket.close()
    assert (workers.admission.requests.used, workers.admission.answers.used) == (0, 0)
