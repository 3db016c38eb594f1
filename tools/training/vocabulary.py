"""Words of the generated passages. The tokenizer was not trained on them: most are several tokens.

`draw` returns a word or phrase of a kind. Names of persons, towns and countries are invented in part, so that an answer
must be copied from the passage.
"""

from collections.abc import Callable

import numpy as np

from tools.training.words import ATTRIBUTES, NAMES, word_list


def _phrases(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


WOMEN = word_list(
    "Mira Anna Nora Clara Lena Ida Ruth Eva Greta Alma Rosa Vera Julia Lucy Martha Sophie Helen Irene Laura Emma "
    "Alice Sarah Maria Grace Ellen Jane Susan Nina Olga Paula Rachel Judith Esther Miriam Naomi Lydia Agnes Edith "
    "Hannah Ingrid Katrin Leila Mona Petra Sonja Tanya Yasmin Zoe Carla Diana Fiona Gloria"
)
MEN = word_list(
    "Tom Paul Felix Oscar Hugo Max Peter Simon Leon Victor Karl Otto Martin Emil Adam Daniel Jack Robert Frank "
    "George Henry David Thomas Arthur Walter John James Joseph Samuel Aaron Noah Isaac Jacob Philip Andrew Stephen "
    "Mark Luke Boris Carlos Dmitri Erik Gustav Hassan Ivan Jonas Kofi Lars Mario Nico Omar Pedro Ravi Stefan Umar "
    "Viktor"
)
PERSONS = (*WOMEN, *MEN, *NAMES)
TOWNS = (
    *ATTRIBUTES["city"],
    *word_list(
        "Bergen Bristol Boston Bremen Budapest Cork Dallas Denver Dover Essen Geneva Genoa Ghent Graz Hamburg Havana "
        "Helsinki Kiel Krakow Kyoto Leeds Leipzig Lima Lyon Malmo Manila Milan Moscow Munich Nairobi Naples Nice "
        "Osaka Oxford Porto Quito Riga Seville Sofia Split Sydney Tallinn Tunis Turin Utrecht Venice Warsaw York Zagreb"
    ),
)
JOBS = _phrases(
    "a baker, a carpenter, a teacher, a nurse, a doctor, a farmer, a fisherman, a gardener, a painter, a pilot, a "
    "sailor, a singer, a tailor, a writer, a weaver, a shepherd, a potter, a smith, a judge, a clerk, a cook, a "
    "guard, a hunter, a mason, a miller, a miner, a porter, a printer, a programmer, a shoemaker, a soldier, a "
    "waiter, an actor, an architect, an engineer, an artist, an editor, a lawyer, a plumber, a driver, a dentist, a "
    "librarian, a barber"
)
PETS = _phrases(
    "a dog, a cat, a horse, a rabbit, a parrot, a goat, a turtle, a hamster, a donkey, a goose, a snake, an owl, a "
    "mouse, a lizard, a pony, a canary, a tame fox, a tame crow, two dogs, three cats, two rabbits, four hens, "
    "three goats"
)
FOODS = word_list(
    "bread cheese soup rice honey eggs fish beans grapes pears apples plums cherries melons figs olives onions "
    "cabbage carrots lentils mushrooms nuts pancakes potatoes pasta porridge pumpkin salad spinach strawberries "
    "toast tomatoes yoghurt chocolate cake butter lamb corn garlic lemons peas dates"
)
COLOURS = (*ATTRIBUTES["colour"], *_phrases("dark red, dark green, light blue, light green, beige, violet, crimson"))
SUBJECTS = word_list(
    "history music physics chemistry biology geography Latin Greek algebra geometry drawing cooking writing dancing "
    "swimming law medicine astronomy philosophy economics grammar logic"
)
INSTRUMENTS = word_list(
    "flute piano violin drum harp trumpet guitar organ lute cello horn oboe clarinet banjo accordion"
)
LANGUAGES = word_list(
    "Latin Greek Hebrew French Spanish German Polish Russian Danish Swedish Turkish Arabic Hindi Chinese Japanese "
    "Italian Dutch Finnish Czech Welsh Irish Korean Persian"
)
COUNTS = word_list("two three four five six seven eight nine ten eleven twelve twenty thirty")
GOODS = word_list(
    "pears apples plums cherries melons figs lemons onions eggs candles baskets ropes bottles cups plates spoons "
    "shirts books pens chairs lamps nails bricks tickets stamps flowers carrots fish loaves jars"
)
OBJECTS = word_list(
    "key lamp box book knife rope basket bottle clock mirror hammer ladder brush wheel chair table bag coat hat "
    "ring map letter cup bell broom bucket candle carpet chest coin comb drum flag helmet jar kettle lantern needle "
    "pen pot saddle saw scarf shield shovel spoon stool sword tent umbrella vase violin watch bicycle boat cart"
)
QUALITIES = word_list("old new small big red blue green black white heavy broken wooden silver golden round long")
BESIDE = word_list("table bed door chair chest window stove wall tree barn bench cupboard curtain fence stairs sofa")
INSIDE = word_list(
    "kitchen garden cellar attic garage drawer box basket barn stable boat cupboard hall office shed well car"
)
ABOVE = word_list("table shelf roof bed chair wall floor bench desk stairs bridge window stove")
PLACES = (
    *(f"{where} the {what}" for where in ("under", "behind", "beside") for what in BESIDE),
    *(f"in the {what}" for what in INSIDE),
    *(f"on the {what}" for what in ABOVE),
)
MATERIALS = word_list(
    "wood iron silver gold copper glass clay stone leather wool silk paper wax bronze brass tin steel cotton linen "
    "ivory marble straw rubber plastic cork"
)
EVENTS = word_list(
    "meeting concert lesson wedding lecture exam market race match play party dinner funeral fair auction trial "
    "parade rehearsal reading picnic feast debate interview workshop council festival"
)
DAYS = word_list("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = word_list("January February March April May June July August September October November December")
VENUES = _phrases(
    "the town hall, the library, the school, the church, the garden, the old mill, the theatre, the castle, the "
    "barn, the museum, the market square, the harbour, the great hall, the station, the gym, the park, the hotel, "
    "the tavern"
)
VEHICLES = word_list("train bus boat ferry coach plane ship")
LOCKS = word_list(
    "safe gate door vault cellar garage server garden office archive chest tower lift alarm account library"
)
BUILDINGS = word_list(
    "bridge tower castle church mill harbour palace school library temple wall lighthouse theatre prison"
)
TOPICS = word_list(
    "horses trees stars ships birds kings bees rivers bridges wine cooking chess war dreams gardens mountains "
    "ghosts medicine music clocks wolves islands trains roses salt"
)
WEATHERS = _phrases("sunny, raining, snowing, cold, warm, foggy, windy, cloudy, hot, stormy, dry, freezing, mild, wet")
UNITS = _phrases("coins, dollars, euros, pounds, crowns, francs")

_ONSETS = word_list("b br c d dr f g gr h k l m n p pr r s st t tr v z sh th")
_VOWELS = word_list("a e i o u a e o ai ia")
_CODAS = ("", "", "", "n", "r", "l", "s", "m", "nd", "rk", "t", "th")


def pick(rng: np.random.Generator, choices: tuple[str, ...]) -> str:
    """Return one of the choices."""
    return choices[int(rng.integers(len(choices)))]


def invented(rng: np.random.Generator) -> str:
    """Return a name of two or three random syllables."""
    syllables = (pick(rng, _ONSETS) + pick(rng, _VOWELS) for _ in range(int(rng.integers(2, 4))))
    return ("".join(syllables) + pick(rng, _CODAS)).capitalize()


def _person(rng: np.random.Generator) -> str:
    return invented(rng) if rng.random() < 0.25 else pick(rng, PERSONS)


def _town(rng: np.random.Generator) -> str:
    return invented(rng) if rng.random() < 0.25 else pick(rng, TOWNS)


def _country(rng: np.random.Generator) -> str:
    return invented(rng) + ("ia" if rng.random() < 0.4 else "")


def _thing(rng: np.random.Generator) -> str:
    quality = f"{pick(rng, QUALITIES)} " if rng.random() < 0.4 else ""
    return f"the {quality}{pick(rng, OBJECTS)}"


def _event(rng: np.random.Generator) -> str:
    return f"the {pick(rng, EVENTS)}"


def _connection(rng: np.random.Generator) -> str:
    return f"the {pick(rng, VEHICLES)} to {_town(rng)}"


def _lock(rng: np.random.Generator) -> str:
    return f"the {pick(rng, LOCKS)}"


def _building(rng: np.random.Generator) -> str:
    place = f" of {_town(rng)}" if rng.random() < 0.5 else ""
    return f"the {pick(rng, BUILDINGS)}{place}"


def _book(rng: np.random.Generator) -> str:
    return f"the book about {pick(rng, TOPICS)}"


def _time(rng: np.random.Generator) -> str:
    if rng.random() < 0.2:
        return pick(rng, ("noon", "midnight", "dawn", "sunset"))
    return (
        f"{rng.integers(1, 24)}:{5 * rng.integers(12):02}" if rng.random() < 0.7 else f"{rng.integers(1, 13)} o'clock"
    )


def _day(rng: np.random.Generator) -> str:
    return pick(rng, DAYS) if rng.random() < 0.5 else f"{rng.integers(1, 29)} {pick(rng, MONTHS)}"


def _count(rng: np.random.Generator, low: int, high: int) -> str:
    return str(rng.integers(low, high))


def _drawn(choices: tuple[str, ...]) -> Callable[[np.random.Generator], str]:
    return lambda rng: pick(rng, choices)


KINDS: dict[str, Callable[[np.random.Generator], str]] = {
    "person": _person,
    "town": _town,
    "country": _country,
    "invented": invented,
    "thing": _thing,
    "event": _event,
    "connection": _connection,
    "lock": _lock,
    "building": _building,
    "book": _book,
    "job": _drawn(JOBS),
    "pet": _drawn(PETS),
    "food": _drawn(FOODS),
    "colour": _drawn(COLOURS),
    "subject": _drawn(SUBJECTS),
    "instrument": _drawn(INSTRUMENTS),
    "language": _drawn(LANGUAGES),
    "place": _drawn(PLACES),
    "material": _drawn(MATERIALS),
    "venue": _drawn(VENUES),
    "weather": _drawn(WEATHERS),
    "time": _time,
    "day": _day,
    "purchase": lambda rng: f"{pick(rng, COUNTS)} {pick(rng, GOODS)}",
    "price": lambda rng: f"{_count(rng, 2, 100)} {pick(rng, UNITS)}",
    "weight": lambda rng: f"{_count(rng, 2, 60)} {pick(rng, ('kilos', 'pounds', 'grams'))}",
    "hours": lambda rng: f"{pick(rng, COUNTS)} {pick(rng, ('hours', 'days', 'minutes'))}",
    "metres": lambda rng: f"{_count(rng, 5, 300)} metres",
    "number": lambda rng: _count(rng, 10, 100),
    "small number": lambda rng: _count(rng, 1, 25),
    "room": lambda rng: _count(rng, 100, 1000),
    "year": lambda rng: _count(rng, 1100, 2020),
    "long count": lambda rng: _count(rng, 60, 900),
    "code": lambda rng: _count(rng, 1000, 10000),
    "long number": lambda rng: _count(rng, 100000, 1000000),
}
"""How a word or phrase of each kind is drawn."""


def draw(rng: np.random.Generator, kind: str) -> str:
    """Return a word or phrase of the kind."""
    return KINDS[kind](rng)


POSSESSIVES = {"she": "her", "he": "his", "it": "its"}


def pronoun(subject: str) -> str | None:
    """Return the pronoun of a known name or of a thing; None for an invented name."""
    if subject.startswith("the "):
        return "it"
    return "she" if subject in WOMEN else "he" if subject in MEN else None
