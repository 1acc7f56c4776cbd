"""How many processes a host runs, and on which cards, where no variable says so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from tessera import defaults
from tessera.launch.processes import Workers, listed
from tessera.launch.settings import OPEN, LaunchSettings
from tessera.machine import Card, Machine


def settled(settings: LaunchSettings, machine: Machine) -> LaunchSettings:
    """The settings with a number for each kind of worker: one of each mode for each card.

    A list of cards that is given for a mode stands for the cards of the machine.
    """

    def workers(given: int, cards: str) -> int:
        if given != OPEN:
            return given
        return defaults.workers(len(listed(cards)) if cards else len(machine.cards))

    return replace(
        settings,
        agg_workers=workers(settings.agg_workers, settings.agg_cuda_visible_devices),
        encode_workers=workers(settings.encode_workers, settings.encode_cuda_visible_devices),
        embed_workers=workers(settings.embed_workers, settings.embed_cuda_visible_devices),
    )


def most_on_a_card(settings: LaunchSettings, machine: Machine, *, parameters: int = 0) -> int:
    """How many workers with both stages share each card, where no setting says so.

    ``parameters`` are those that an input passes. ``settings`` are as they were given. Each has room on the
    smallest card; one whose memory is not known may have none of its own.
    """
    if settings.agg_workers != OPEN or settings.agg_cuda_visible_devices or not machine.cards:
        return 1
    cores = machine.cores // len(machine.cards)
    nbytes = min(card.nbytes for card in machine.cards)
    return defaults.workers_on_a_card(cores=cores, nbytes=nbytes, parameters=parameters)


def with_frontends(settings: LaunchSettings, workers: Sequence[Workers], machine: Machine) -> LaunchSettings:
    """The settings with a number of frontends, for those workers of this host."""
    if settings.frontends != OPEN:
        return settings
    count = defaults.frontends(
        cores=machine.cores,
        nbytes=machine.nbytes,
        cards=len(machine.cards),
        workers=sum(kind.count for kind in workers),
    )
    return replace(settings, frontends=count)


def on_cards(workers: Sequence[Workers], machine: Machine, others: Sequence[Workers] = ()) -> list[Workers]:
    """The workers with lists of the machine's cards where none is given.

    Each worker gets the card with the fewest of its kind, and of those the one with the fewest of all; the
    ``others`` count, which are placed already. With one card there is nothing to say.
    """
    cards = [card.entry for card in machine.cards]
    if len(cards) < 2:
        return list(workers)
    placed = [*others, *(kind for kind in workers if kind.gpus)]
    taken = Counter(card for kind in placed for card in kind.cards)
    found = []
    for kind in workers:
        if not kind.gpus and kind.count:
            own: list[str] = []
            for _ in range(kind.count):
                own.append(min(cards, key=lambda card: (own.count(card), taken[card], cards.index(card))))
                taken[own[-1]] += 1
            kind = replace(kind, gpus=",".join(own))
        found.append(kind)
    return found


def sharing(workers: Sequence[Workers], machine: Machine) -> list[list[int]]:
    """For each worker of each kind how many workers its card has, itself included; 1 without a card."""
    of = [placed(kind, machine) for kind in workers]
    counts = Counter(card for cards in of for card in cards if card)
    return [[counts.get(card, 1) for card in cards] for cards in of]


def placed(kind: Workers, machine: Machine) -> list[str]:
    """The card of each worker; empty without one. A worker without a list takes the first that it sees."""
    first = machine.cards[0].entry if machine.cards else ""
    return [card or first for card in kind.cards]


def described(settings: LaunchSettings, workers: Sequence[Workers], machine: Machine) -> str:
    """One line: what the machine has, and what is started on it."""
    kinds: Counter[str] = Counter()
    for kind in workers:
        kinds[kind.role] += kind.count
    started = [_counted(settings.frontends, "frontend")] if settings.frontends else []
    started += [_counted(count, f"{role} worker") for role, count in kinds.items() if count] or ["no worker"]
    return f"this host: {_machine(machine)}: {', '.join(started)}{_places(workers, machine)}"


def _machine(machine: Machine) -> str:
    alike = Counter(_card(card) for card in machine.cards)
    parts = [f"{count} {card}" for card, count in alike.items()]
    memory = f"{machine.nbytes / defaults.GIB:.0f} GiB"
    return ", ".join([*parts, _counted(machine.cores, "core"), memory])


def _card(card: Card) -> str:
    return f"{card.name} of {card.nbytes / defaults.GIB:.0f} GiB" if card.nbytes else card.name


def _places(workers: Sequence[Workers], machine: Machine) -> str:
    """Which workers are on which card, where there are several of either."""
    if not machine.cards or sum(kind.count for kind in workers) < 2:
        return ""
    of: dict[str, Counter[str]] = {}
    for kind in workers:
        for card in placed(kind, machine):
            of.setdefault(card, Counter())[kind.role + (f" of {kind.model}" if kind.model else "")] += 1
    said = {
        card: " and ".join(f"{count} {role}" for role, count in roles.items()) for card, roles in of.items()
    }
    if len(set(said.values())) == 1 and len(said) == len(machine.cards):
        (each,) = set(said.values())
        return f", {each} on each GPU" if len(said) > 1 else ", on one GPU"
    return "".join(f"; GPU {card}: {roles}" for card, roles in said.items())


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
