"""The words of the world: what shapes and colours are called, and what may be written on a page."""

from __future__ import annotations

SHAPES = (
    "circle", "square", "triangle", "star", "diamond", "hexagon",
    "heart", "cross", "ring", "crescent", "arrow", "half circle",
)  # fmt: skip

COLOURS = {
    "red": (214, 40, 40),
    "orange": (245, 140, 20),
    "yellow": (250, 215, 30),
    "green": (40, 160, 60),
    "cyan": (40, 195, 215),
    "blue": (40, 80, 210),
    "purple": (130, 50, 170),
    "pink": (250, 130, 190),
    "brown": (120, 75, 35),
    "black": (20, 20, 20),
    "white": (250, 250, 250),
    "grey": (135, 135, 135),
}

COUNTS = ("one", "two", "three", "four", "five")
SIZES = ("small", "large")

PLACES = (
    "top left", "top", "top right",
    "left", "centre", "right",
    "bottom left", "bottom", "bottom right",
)  # fmt: skip

RELATIONS = ("left of", "right of", "above", "below", "inside")
OPPOSITES = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}

CHART_KINDS = ("bar", "line", "pie")

_WORDS = """
acorn airport almond anchor apple april arcade arch arrow artist atlas august autumn badge baker
balcony ballad banana banner barley basket beach beacon beetle bell bicycle birch blanket bottle
branch bread breeze brick bridge bronze brook brush bucket budget butter button cabin cable cactus
camel camera canal candle canoe canyon captain carbon cargo carpet castle cedar cellar cement chalk
chapel cherry chess cinema circus citrus clay clinic clock cloud clover coast cobalt coffee comet
compass copper coral cotton cousin cradle crane crater cricket crown crystal curtain cycle dagger
dance dawn december delta desert diesel dinner doctor dolphin donkey dragon drum eagle echo eclipse
elbow ember empire engine evening export fabric falcon farmer feather fern ferry fiddle field finger
flame flute forest fossil fountain fox frost galaxy garage garden garlic ginger giraffe glacier glass
glove goblet gold grape gravel guitar gulf hammer harbour harvest hazel helmet hermit heron hockey
honey hotel hunter iceberg island ivory jacket jaguar jasmine jewel jungle kettle kitchen kite ladder
lagoon lantern laurel lawyer leather lemon lens library lily linen lion lobster locket lumber magnet
mango maple marble march market meadow melon mercury meteor mill mirror monkey monsoon moss mountain
museum mustard needle nickel night nurse oasis ocean october olive onion opera orbit orchard orchid
otter oven oxygen paddle palace panda panther paper parade parcel parrot pasture pearl pebble pencil
pepper piano pigeon pillow pilot pine pirate planet plaza pocket polar pollen poppy portrait potato
prairie prince puzzle quartz quiver rabbit radar railway rain raven reef river robin rocket rubber
saddle saffron sailor salmon sapphire satin school seed shadow shelf shepherd shuttle silk silver
sketch sleigh snail sparrow spice spiral spring sprout stable statue steam stone storm studio sugar
summer sunset swan sword tailor tango teapot temple theatre thimble thistle thunder ticket tiger
timber tower tractor treasure trumpet tulip tunnel turbine turtle umbrella valley vanilla velvet
village vinegar violin volcano wagon walnut walrus water whale wheat whistle willow window winter
wizard wolf yacht yellow zebra zinc
"""
WORDS = tuple(_WORDS.split())
"""Everything that is ever written on a page, a chart or a table, besides numbers."""

_PEOPLE = """
Ada Amir Bela Carlos Chidi Clara Dana Diego Elena Emil Farah Felix Greta Hana Hugo Ines Ivan Jonas
Kaito Karin Lena Luca Maya Milan Nadia Nora Omar Otto Pavel Petra Quinn Rosa Samir Selma Tariq Tilda
Uma Vera Yusuf Zoe
"""
PEOPLE = tuple(_PEOPLE.split())

_CITIES = """
Accra Athens Bergen Berlin Bogota Cairo Cork Dakar Delhi Denver Dublin Geneva Hanoi Havana Jakarta
Kyoto Lagos Lima Lisbon London Madrid Malmo Manila Mumbai Nairobi Naples Oslo Paris Porto Prague
Quito Riga Rome Seoul Sydney Tallinn Tokyo Turin Vienna Zagreb
"""
CITIES = tuple(_CITIES.split())
