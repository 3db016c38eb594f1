"""Word lists of the generated texts. Changes require a new tokenizer, which was trained on them."""


def word_list(text: str) -> tuple[str, ...]:
    """Return the words between blanks."""
    return tuple(text.split())


NAMES = word_list(
    "Mira Tom Anna Paul Nora Felix Clara Oscar Lena Hugo Ida Max Ruth Peter Eva Simon Greta Leon Alma Victor "
    "Rosa Karl Vera Otto Julia Martin Lucy Emil Martha Adam Sophie Daniel Helen Jack Irene Robert Laura Frank "
    "Emma George Alice Henry Sarah David Maria Thomas Grace Arthur Ellen Walter"
)

ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "colour": word_list("red blue green yellow black white brown orange purple grey pink silver golden"),
    "city": word_list("Paris London Rome Berlin Madrid Vienna Oslo Cairo Lisbon Athens Prague Dublin Delhi Tokyo"),
    "animal": word_list("horse dog cat fox wolf bear lion eagle owl goat sheep mouse frog whale snake tiger"),
    "fruit": word_list("apple pear plum cherry lemon grape melon peach fig banana olive berry"),
    "tool": word_list("hammer saw knife rope lamp spade needle wheel ladder brush key clock mirror basket"),
    "number": (),
}
"""Possible values by attribute; those of ``number`` are 10 to 99 and not listed."""

GREETINGS = (
    ("Hello.", "Hello. What can I do for you?"),
    ("Good morning.", "Good morning. How can I help?"),
    ("Who are you?", "I am a small language model. I can remember what you tell me in this conversation."),
    ("What can you do?", "I can remember facts that you tell me, and repeat them when you ask."),
    ("Thank you.", "You are welcome."),
    ("Thanks for your help.", "You are welcome."),
    ("Goodbye.", "Goodbye."),
)

ACKNOWLEDGEMENTS = ("I will remember that.", "Understood.", "Noted.")

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "Answer with a full sentence.",
    "Remember every fact and answer from the conversation.",
)
