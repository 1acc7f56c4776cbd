"""What one key takes of the pools of a frontend leaves another key's requests their turns."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from benchmarks.names import own_names

from tests.e2e.disaggregated import Disaggregated
from tests.e2e.felt import LONG, Felt, frontend_pid, resident_bytes
from tests.e2e.flooding import flooding
from tests.e2e.floods import ACCENTS, SETTINGS, Asker, asking, slow_host
from tests.e2e.service import MODEL, free_ports
from tests.proc import forget_peak, peak_bytes
from tests.waiting import until

pytestmark = [pytest.mark.service, pytest.mark.xdist_group("shared-service")]

# Beyond what is made on a thread.
VERY_LONG = "word " * 60_000
MIB = 1 << 20
BUDGET = 256 * MIB


@contextmanager
def frontend(service: Disaggregated, *flags: str) -> Iterator[str]:
    with service.frontend("--allow-private-media", *flags, settings=SETTINGS) as url:
        yield url


async def answered(bob: Asker, *images: str) -> None:
    """Bob's texts, short and long, and his images have vectors."""
    for text in ("short", LONG, VERY_LONG):
        # Engines would be at 10,240 tokens for seconds.
        answer = await bob.embed(text, truncate_prompt_tokens=64)
        assert answer.status_code == 200, answer.text
    for url in images:
        answer = await bob.images(url)
        assert answer.status_code == 200, (url, answer.text)


async def given_back(bob: Asker, rest: int = 0) -> None:
    """Wait until no request is left, not even of a client that has gone, and no memory beyond ``rest``."""

    async def idle() -> bool:
        return not await bob.in_flight()

    await until(idle)
    if rest:
        pid = frontend_pid(bob.url)
        await until(
            lambda: resident_bytes(pid) < rest + 100 * MIB, said=lambda: f"{resident_bytes(pid)}, {rest}"
        )


@pytest.mark.kserve
@pytest.mark.parametrize(
    "name",
    [
        "60 MB of []",
        '60 MB of ""',
        "4.2 million token ids",
        "24 messages, wrong key",
        "30 half bodies",
        "30 half bodies, KServe",
        "4 x 38 million, and leave",
    ],
)
async def test_another_key_is_answered_within_a_second(
    service: Disaggregated, photos: dict[str, bytes], name: str
) -> None:
    """A frontend takes no more than the budget and 512 MiB meanwhile, and gives it back."""
    (port,) = free_ports(1)
    with frontend(service, "--grpc-port", str(port), "--max-bodies-mb", str(BUDGET // MIB)) as url:
        async with asking(url) as (_, bob), slow_host(photos["flower"]) as host:
            await answered(bob, host.url)
            rest = forget_peak(pid := frontend_pid(url))
            with flooding(name, int(url.rpartition(":")[2]), port, MODEL) as flood:
                await asyncio.sleep(1.0)
                await Felt(service, bob).answers(host.url)
                assert flood.poll() is None
            assert peak_bytes(pid) - rest < BUDGET + 512 * MIB
            await given_back(bob, rest)


async def test_long_texts_of_a_key_leave_threads_and_processes_to_others(
    service: Disaggregated, photos: dict[str, bytes]
) -> None:
    with frontend(service) as url:
        async with asking(url) as (alice, bob), slow_host(photos["flower"]) as host:
            await answered(bob, host.url)
            rest = resident_bytes(frontend_pid(url))
            flood = [
                *(asyncio.create_task(alice.embed(*[ACCENTS] * 7)) for _ in range(3)),
                *(asyncio.create_task(alice.embed(*["e\u0301" * 120_000] * 100)) for _ in range(3)),
            ]
            await asyncio.sleep(1.0)
            await answered(bob)
            await Felt(service, bob).answers(host.url)
            assert not any(task.done() for task in flood)
            for task in flood:
                task.cancel()
            await asyncio.wait(flood)
            await given_back(bob, rest)


async def test_nobody_works_for_clients_that_have_left(service: Disaggregated) -> None:
    with frontend(service) as url:
        async with asking(url) as (alice, bob):
            await answered(bob)
            await asyncio.gather(*(alice.hang_up(*[ACCENTS] * 7) for _ in range(4)))
            # Their own key has its whole share again, behind one piece of work at most.
            await answered(alice)
            await given_back(bob)


async def test_a_long_text_ends_with_its_deadline(service: Disaggregated) -> None:
    with frontend(service, "--request-timeout-seconds", "4") as url:
        async with asking(url) as (alice, bob):
            answers = await asyncio.gather(*(alice.embed(*[ACCENTS] * 7) for _ in range(2)))
            assert [answer.status_code for answer in answers] == [504, 504]
            # Without their deadline they were answered after 36 s; a busy machine is late itself.
            assert max(answer.elapsed.total_seconds() for answer in answers) < 20
            await given_back(bob)
            assert (await alice.embed(LONG)).status_code == 200


async def test_slow_image_hosts_of_a_key_leave_fetches_to_others(
    service: Disaggregated, photos: dict[str, bytes]
) -> None:
    with frontend(service, "--media-timeout-seconds", "200", "--request-timeout-seconds", "200") as url:
        async with asking(url) as (alice, bob), slow_host(photos["flower"]) as host:
            await answered(bob, host.url)
            flood = [
                asyncio.create_task(
                    alice.images(*[f"{host.url}/slow/{at}-{number}" for number in range(30)], partial=True)
                )
                for at in range(3)
            ]
            await until(lambda: host.slow >= 16)
            await answered(bob)
            await Felt(service, bob).answers(host.url)
            answer = await bob.images(*(f"{host.url}/{at}" for at in range(4)))
            assert answer.status_code == 200, answer.text
            assert host.slow == 16
            flood[0].cancel()
            host.may_end.set()
            for answer in await asyncio.gather(*flood[1:]):
                assert all(row["embedding"] for row in answer.json()["data"])
            await given_back(bob)


async def test_names_without_an_answer_leave_look_ups_to_others(
    service: Disaggregated, photos: dict[str, bytes], tmp_path: Path
) -> None:
    if (names := own_names(tmp_path)) is None:
        pytest.skip("a name server of its own needs the rights to mount a file and to listen on port 53")
    flags = ("--allow-private-media",)
    with service.frontend(*flags, settings=SETTINGS, before=names.command) as url:
        async with names.served() as server, asking(url) as (alice, bob), slow_host(photos["flower"]) as host:
            # As they are, by the search domain, from the hosts file, and as numbers.
            hosts = ["fast.example", "fast", "localhost", "127.0.0.1", "2130706433"]
            images = [host.url.replace("127.0.0.1", name) for name in hosts]
            await answered(bob, *images)

            async def flood(at: int) -> None:
                slow = [f"http://slow{at}-{number}.example/x" for number in range(16)]
                answer = await alice.images(*slow, partial=True)
                assert answer.status_code == 200
                rows = answer.json()["data"]
                assert all("did not answer in time" in row["error"]["message"] for row in rows)

            floods = [asyncio.create_task(flood(at)) for at in range(4)]
            await until(lambda: server.asked)
            await answered(bob, *images)
            await Felt(service, bob).answers(*images)
            await asyncio.gather(*floods)
            await given_back(bob)
            await answered(alice, *images)
