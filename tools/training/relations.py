"""Relations between a subject and a value, each with the sentences that state it, ask for it and answer it.

In a template, ``{s}`` stands for the subject and ``{v}`` for the value. ``{s}'s`` becomes *his*, *her* or *its* where a
pronoun is used. Answers are whole sentences, so that they can be read without their question.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Relation:
    """``subject`` and ``value`` name kinds of `vocabulary.draw`; ``reverse`` asks for the subject of a value."""

    name: str
    subject: str
    value: str
    statements: tuple[str, ...]
    questions: tuple[str, ...]
    answer: str
    reverse: tuple[str, ...] = ()


def _of(*forms: str) -> tuple[str, ...]:
    return forms


RELATIONS = (
    Relation(
        "home",
        "person",
        "town",
        _of("{s} lives in {v}.", "{s} moved to {v} last year.", "{s}'s house is in {v}.", "{s} has a flat in {v}."),
        _of("Where does {s} live?", "In which town does {s} live?", "What town does {s} live in?"),
        "{s} lives in {v}.",
        _of(
            "Who lives in {v}?",
        ),
    ),
    Relation(
        "job",
        "person",
        "job",
        _of("{s} works as {v}.", "{s} is {v}.", "{s} has worked as {v} for many years.", "{s} earns a living as {v}."),
        _of("What is {s}'s job?", "What does {s} do for a living?", "What is the profession of {s}?"),
        "{s} works as {v}.",
        _of(
            "Who works as {v}?",
        ),
    ),
    Relation(
        "age",
        "person",
        "number",
        _of("{s} is {v} years old.", "{s} turned {v} this year.", "{s}'s age is {v}."),
        _of("How old is {s}?", "What is the age of {s}?", "What is {s}'s age?"),
        "{s} is {v} years old.",
    ),
    Relation(
        "birth",
        "person",
        "year",
        _of("{s} was born in {v}.", "{s}'s year of birth is {v}.", "{s} came into the world in {v}."),
        _of("When was {s} born?", "In which year was {s} born?", "What is {s}'s year of birth?"),
        "{s} was born in {v}.",
    ),
    Relation(
        "pet",
        "person",
        "pet",
        _of("{s} has {v}.", "{s} keeps {v} at home.", "{s}'s pet is {v}."),
        _of("What pet does {s} have?", "Which animal does {s} keep?", "What is {s}'s pet?"),
        "{s} has {v}.",
        _of(
            "Who has {v}?",
        ),
    ),
    Relation(
        "food",
        "person",
        "food",
        _of("{s} likes {v}.", "{s} eats {v} every day.", "{s}'s favourite food is {v}."),
        _of("What does {s} like to eat?", "What is {s}'s favourite food?", "Which food does {s} like?"),
        "{s} likes {v}.",
        _of(
            "Who likes {v}?",
        ),
    ),
    Relation(
        "favourite colour",
        "person",
        "colour",
        _of("{s}'s favourite colour is {v}.", "{s} likes the colour {v} best.", "The favourite colour of {s} is {v}."),
        _of("What is {s}'s favourite colour?", "Which colour does {s} like best?", "What colour does {s} like?"),
        "{s}'s favourite colour is {v}.",
    ),
    Relation(
        "subject taught",
        "person",
        "subject",
        _of("{s} teaches {v}.", "{s} gives lessons in {v}.", "{s} is a teacher of {v}."),
        _of("What does {s} teach?", "Which subject does {s} teach?", "What subject does {s} teach?"),
        "{s} teaches {v}.",
        _of(
            "Who teaches {v}?",
        ),
    ),
    Relation(
        "instrument",
        "person",
        "instrument",
        _of("{s} plays the {v}.", "{s} has played the {v} since childhood.", "{s}'s instrument is the {v}."),
        _of("Which instrument does {s} play?", "What instrument does {s} play?", "What does {s} play?"),
        "{s} plays the {v}.",
        _of(
            "Who plays the {v}?",
        ),
    ),
    Relation(
        "language",
        "person",
        "language",
        _of("{s} speaks {v}.", "{s}'s mother tongue is {v}.", "{s} grew up speaking {v}."),
        _of("Which language does {s} speak?", "What language does {s} speak?", "What is {s}'s mother tongue?"),
        "{s} speaks {v}.",
        _of(
            "Who speaks {v}?",
        ),
    ),
    Relation(
        "room",
        "person",
        "room",
        _of("{s} is in room {v}.", "{s}'s room is {v}.", "{s} has room {v}."),
        _of("Which room is {s} in?", "What is {s}'s room?", "In which room is {s}?"),
        "{s} is in room {v}.",
        _of(
            "Who is in room {v}?",
        ),
    ),
    Relation(
        "purchase",
        "person",
        "purchase",
        _of("{s} bought {v} at the market.", "{s} came home with {v}.", "At the market {s} bought {v}."),
        _of("What did {s} buy?", "What did {s} buy at the market?"),
        "{s} bought {v}.",
        _of(
            "Who bought {v}?",
        ),
    ),
    Relation(
        "destination",
        "person",
        "town",
        _of("{s} is travelling to {v}.", "{s} wants to visit {v}.", "{s} is on the way to {v}."),
        _of("Where is {s} going?", "Where is {s} travelling to?", "Which town does {s} want to visit?"),
        "{s} is travelling to {v}.",
    ),
    Relation(
        "friend",
        "person",
        "person",
        _of("{s}'s best friend is {v}.", "{s} is a friend of {v}.", "{s} has a friend called {v}."),
        _of("Who is {s}'s friend?", "Who is the best friend of {s}?", "Who is {s}'s best friend?"),
        "{s}'s friend is {v}.",
    ),
    Relation(
        "telephone",
        "person",
        "long number",
        _of("{s}'s telephone number is {v}.", "You can call {s} at {v}.", "{s} can be called at {v}."),
        _of("What is {s}'s telephone number?", "At which number can I call {s}?", "How can I call {s}?"),
        "{s}'s telephone number is {v}.",
    ),
    Relation(
        "place",
        "thing",
        "place",
        _of("{s} is {v}.", "{s} lies {v}.", "You will find {s} {v}.", "Somebody has put {s} {v}."),
        _of("Where is {s}?", "Where can I find {s}?", "Where do I find {s}?"),
        "{s} is {v}.",
        _of(
            "What is {v}?",
        ),
    ),
    Relation(
        "colour",
        "thing",
        "colour",
        _of("{s} is {v}.", "{s} has been painted {v}.", "The colour of {s} is {v}."),
        _of("What colour is {s}?", "Which colour is {s}?", "What is the colour of {s}?"),
        "{s} is {v}.",
    ),
    Relation(
        "owner",
        "thing",
        "person",
        _of("{s} belongs to {v}.", "{v} owns {s}.", "The owner of {s} is {v}."),
        _of("Who owns {s}?", "To whom does {s} belong?", "Whose is {s}?"),
        "{s} belongs to {v}.",
        _of("What belongs to {v}?", "What does {v} own?"),
    ),
    Relation(
        "price",
        "thing",
        "price",
        _of("{s} costs {v}.", "The price of {s} is {v}.", "{s} is sold for {v}."),
        _of("How much does {s} cost?", "What is the price of {s}?", "What does {s} cost?"),
        "{s} costs {v}.",
        _of(
            "What costs {v}?",
        ),
    ),
    Relation(
        "material",
        "thing",
        "material",
        _of("{s} is made of {v}.", "{s} was made from {v}.", "{s} consists of {v}."),
        _of("What is {s} made of?", "Which material is {s} made of?", "What does {s} consist of?"),
        "{s} is made of {v}.",
        _of(
            "What is made of {v}?",
        ),
    ),
    Relation(
        "weight",
        "thing",
        "weight",
        _of("{s} weighs {v}.", "The weight of {s} is {v}."),
        _of("How heavy is {s}?", "What does {s} weigh?", "What is the weight of {s}?"),
        "{s} weighs {v}.",
    ),
    Relation(
        "day",
        "event",
        "day",
        _of("{s} is on {v}.", "{s} takes place on {v}.", "{s} was moved to {v}."),
        _of("When is {s}?", "On which day is {s}?", "What day is {s} on?"),
        "{s} is on {v}.",
        _of("What takes place on {v}?", "What is on {v}?"),
    ),
    Relation(
        "hour",
        "event",
        "time",
        _of("{s} begins at {v}.", "{s} starts at {v}.", "{v} is when {s} begins."),
        _of("At what time does {s} begin?", "When does {s} begin?", "When does {s} start?"),
        "{s} begins at {v}.",
        _of(
            "What begins at {v}?",
        ),
    ),
    Relation(
        "venue",
        "event",
        "venue",
        _of("{s} is held in {v}.", "{s} takes place in {v}.", "People meet in {v} for {s}."),
        _of("Where is {s} held?", "Where does {s} take place?", "In which place is {s}?"),
        "{s} takes place in {v}.",
        _of(
            "What takes place in {v}?",
        ),
    ),
    Relation(
        "host",
        "event",
        "person",
        _of("{v} leads {s}.", "{s} is led by {v}.", "{v} is in charge of {s}."),
        _of("Who leads {s}?", "Who is in charge of {s}?"),
        "{v} leads {s}.",
        _of(
            "What does {v} lead?",
        ),
    ),
    Relation(
        "visitors",
        "event",
        "number",
        _of("{v} people will come to {s}.", "{s} expects {v} people.", "{s} has {v} guests."),
        _of("How many people will come to {s}?", "How many guests does {s} have?"),
        "{v} people will come to {s}.",
    ),
    Relation(
        "departure",
        "connection",
        "time",
        _of("{s} leaves at {v}.", "{s} departs at {v}.", "At {v} {s} leaves."),
        _of("When does {s} leave?", "At what time does {s} leave?", "When does {s} depart?"),
        "{s} leaves at {v}.",
        _of(
            "What leaves at {v}?",
        ),
    ),
    Relation(
        "platform",
        "connection",
        "small number",
        _of("{s} leaves from platform {v}.", "{s} waits at platform {v}.", "Platform {v} is for {s}."),
        _of("From which platform does {s} leave?", "Which platform does {s} leave from?"),
        "{s} leaves from platform {v}.",
        _of(
            "What leaves from platform {v}?",
        ),
    ),
    Relation(
        "duration",
        "connection",
        "hours",
        _of("{s} takes {v}.", "The journey with {s} lasts {v}."),
        _of("How long does {s} take?", "How long is the journey with {s}?"),
        "{s} takes {v}.",
    ),
    Relation(
        "capital",
        "country",
        "town",
        _of("The capital of {s} is {v}.", "{v} is the capital of {s}.", "{s} has {v} as its capital."),
        _of("What is the capital of {s}?", "Which town is the capital of {s}?"),
        "The capital of {s} is {v}.",
        _of(
            "Of which country is {v} the capital?",
        ),
    ),
    Relation(
        "ruler",
        "country",
        "person",
        _of("{s} is ruled by {v}.", "{v} is the ruler of {s}.", "The ruler of {s} is {v}."),
        _of("Who rules {s}?", "Who is the ruler of {s}?"),
        "{s} is ruled by {v}.",
        _of(
            "Which country does {v} rule?",
        ),
    ),
    Relation(
        "product",
        "country",
        "material",
        _of("{s} exports {v}.", "{s} is known for its {v}.", "{s} sells {v} to other countries."),
        _of("What does {s} export?", "What is {s} known for?"),
        "{s} exports {v}.",
        _of(
            "Which country exports {v}?",
        ),
    ),
    Relation(
        "river",
        "country",
        "invented",
        _of("The longest river of {s} is the {v}.", "The {v} flows through {s}.", "{s} lies on the river {v}."),
        _of("What is the longest river of {s}?", "Which river flows through {s}?"),
        "The {v} flows through {s}.",
        _of(
            "Through which country does the {v} flow?",
        ),
    ),
    Relation(
        "code",
        "lock",
        "code",
        _of("The code of {s} is {v}.", "The code for {s} is {v}.", "{s} opens with the code {v}."),
        _of("What is the code of {s}?", "Which code opens {s}?", "What is the code for {s}?"),
        "The code of {s} is {v}.",
    ),
    Relation(
        "password",
        "lock",
        "invented",
        _of("The password of {s} is {v}.", "The password for {s} is {v}.", "{s} needs the password {v}."),
        _of("What is the password of {s}?", "Which password does {s} need?", "What is the password for {s}?"),
        "The password of {s} is {v}.",
    ),
    Relation(
        "builder",
        "building",
        "person",
        _of("{s} was built by {v}.", "{v} built {s}.", "The builder of {s} was {v}."),
        _of("Who built {s}?", "By whom was {s} built?"),
        "{s} was built by {v}.",
        _of(
            "What did {v} build?",
        ),
    ),
    Relation(
        "built",
        "building",
        "year",
        _of("{s} was built in {v}.", "{s} was finished in {v}.", "{s} dates from {v}."),
        _of("When was {s} built?", "In which year was {s} built?", "How old is {s}?"),
        "{s} was built in {v}.",
        _of(
            "What was built in {v}?",
        ),
    ),
    Relation(
        "height",
        "building",
        "metres",
        _of("{s} is {v} high.", "{s} has a height of {v}.", "The height of {s} is {v}."),
        _of("How high is {s}?", "What is the height of {s}?"),
        "{s} is {v} high.",
    ),
    Relation(
        "author",
        "book",
        "person",
        _of("{v} wrote {s}.", "{s} was written by {v}.", "The author of {s} is {v}."),
        _of("Who wrote {s}?", "Who is the author of {s}?"),
        "{s} was written by {v}.",
        _of(
            "What did {v} write?",
        ),
    ),
    Relation(
        "pages",
        "book",
        "long count",
        _of("{s} has {v} pages.", "There are {v} pages in {s}."),
        _of("How many pages does {s} have?", "How long is {s}?"),
        "{s} has {v} pages.",
    ),
    Relation(
        "weather",
        "town",
        "weather",
        _of("In {s} it is {v}.", "The weather in {s} is {v}.", "It is {v} in {s} today."),
        _of("What is the weather in {s}?", "How is the weather in {s}?", "What is the weather like in {s}?"),
        "In {s} it is {v}.",
        _of(
            "Where is it {v}?",
        ),
    ),
)

BY_NAME = {relation.name: relation for relation in RELATIONS}
UNKNOWN = "I do not know."
"""The answer to a question whose answer has not been stated."""

SUBJECT_WEIGHTS = {
    "person": 8.0, "thing": 5.0, "event": 3.0, "connection": 1.5, "country": 2.0, "lock": 1.0, "building": 1.5,
    "book": 1.0, "town": 1.0,
}  # fmt: skip
"""How often a passage is about a subject of each kind."""


def relations_of(kind: str) -> tuple[Relation, ...]:
    """Return the relations of a kind of subject."""
    return tuple(relation for relation in RELATIONS if relation.subject == kind)
