"""Real prompts: what people ask small models, in several shapes and lengths."""

from __future__ import annotations

from dataclasses import dataclass

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class RealPrompt:
    """Text, or the messages of a chat. `ignore_eos` False: the answer may end before its last token."""

    name: str
    prompt: str | Messages
    ignore_eos: bool = True


def _user(text: str, *, system: str | None = None) -> Messages:
    messages = [{"role": "user", "content": text}]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


_LIBRARIAN = """You are the assistant of a public library in a town of forty thousand people. You answer questions about \
opening hours, lending rules, events and the collection, and you help readers to find their next book. The library is open \
from Tuesday to Friday between ten in the morning and seven in the evening, and on Saturday between ten and four; it is \
closed on Sunday and Monday. A reader may borrow up to twelve items at a time. Books are lent for four weeks, films and \
games for one week; a loan may be renewed twice unless somebody else has reserved the item. A book that is returned late \
costs twenty cents a day, but never more than five euros. Children pay no fines. The children's department holds a reading \
hour every Wednesday at four, and the local history society meets on the first Thursday of the month in the room under the \
roof. When you recommend a book, say in one sentence why it suits the reader, and mention whether the library owns it as \
paper, as large print or as a recording. Never invent an event, a price or a title. If you do not know something, say so \
and name the desk that does. Be brief, be friendly, and write plain English without exclamation marks."""

_LIGHTHOUSE = """The lighthouse at the end of the northern pier was built in 1871, after three ships had been lost within a \
single winter. Its first keeper was a retired whaler named Anselm, who lived in the two rooms below the lantern with his wife, \
his daughter and a grey cat that was said to predict the weather. Every evening, half an hour before sunset, he climbed \
the hundred and twelve steps with a can of oil, trimmed the wick, wound the clockwork that turned the lens, and wrote \
one line into a black book: the date, the wind, and the names of the ships that had passed. The books have survived. \
They fill a shelf in the harbour office, and whoever reads them notices that in forty years the old man never missed a \
night."""

_RECIPE = (
    "To make a simple bread you need five hundred grams of flour, three hundred and fifty grams of water, ten grams of salt"
)

PROMPTS = [
    RealPrompt("france", "The capital of France is"),
    RealPrompt("france again", "The capital of France is Paris, and the capital of Italy is"),
    RealPrompt("fibonacci", "def fibonacci(n):\n    "),
    RealPrompt("letter", "Dear 李明 🙂,\nThank you for your letter"),
    RealPrompt("sky", "Why is the sky blue during the day and red in the evening?"),
    RealPrompt("boiling", "Question: At what temperature does water boil at sea level?\nAnswer:"),
    RealPrompt("history", "Who wrote the play about the prince of Denmark, and in which century?"),
    RealPrompt("sql", "-- Names of all customers with more than ten orders\nSELECT name FROM customers"),
    RealPrompt("html", '<!DOCTYPE html>\n<html>\n  <head>\n    <meta charset="utf-8">\n    <title>'),
    RealPrompt("class", "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):"),
    RealPrompt("groceries", "Shopping list:\n1. Milk\n2. Eggs\n3. Bread\n4."),
    RealPrompt("planets", "The planets of the solar system, from the sun outwards:\n- Mercury\n- Venus\n- Earth\n-"),
    RealPrompt("numbers", "2, 4, 8, 16, 32, 64, 128, 256,"),
    RealPrompt("emoji", "Translate emoji into words. 🐱 = cat, 🐶 = dog, 🌧️ = rain, ☀️ ="),
    RealPrompt("bread", _RECIPE + " and"),
    RealPrompt("bread and yeast", _RECIPE + ", and seven grams of yeast. First,"),
    RealPrompt("chat", _user("What is the capital of France?"), ignore_eos=False),
    RealPrompt(
        "chat in turns", [*_user("Name a fruit."), {"role": "assistant", "content": "Apple."}, *_user("And a yellow one?")]
    ),
    RealPrompt("hours", _user("Can I come on Monday?", system=_LIBRARIAN), ignore_eos=False),
    RealPrompt("fines", _user("A book of mine is nine days late. How much do I owe?", system=_LIBRARIAN), ignore_eos=False),
    RealPrompt("children", _user("Is there anything for my six year old daughter?", system=_LIBRARIAN)),
    RealPrompt("chinese reader", _user("我可以借几本书？", system=_LIBRARIAN)),  # noqa: RUF001 - Chinese has its own
    RealPrompt("lighthouse", _LIGHTHOUSE + "\n\nQuestion: What did the keeper write into the black book?\nAnswer:"),
    RealPrompt("lighthouse goes on", _LIGHTHOUSE + " In the autumn of 1889"),
]
