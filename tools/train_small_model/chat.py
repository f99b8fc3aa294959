"""Conversations made from the books: a request for a passage, the passage, what follows it.

The answers are the books' own paragraphs; only the requests are composed, from the section's
title, from a name or a common noun that the passage is about, or from its first words.
"""

from __future__ import annotations

import random
import re
from collections import Counter

from tokenizer import turns


def _words(text: str) -> list[str]:
    return text.split()


_NOUNS = _words(
    "king queen prince princess boy girl man woman child children fox wolf bear lion dog cat horse"
    " bird rabbit mouse frog snake fish giant witch fairy dragon wizard soldier sailor captain"
    " pirate doctor father mother brother sister uncle aunt ship island sea river forest garden"
    " castle house mountain winter summer ring sword treasure gold letter tree train school"
)
_PLURAL = {f"{noun}s": noun for noun in _NOUNS} | {"wolves": "wolf", "mice": "mouse"}
_COMMON = frozenset(
    _words(
        "I The A An And But Or If So Then There They He She It We You His Her My Your Its Their Our"
        " This That These Those What When Where Why Who How Yes No Oh Ah Well Now Not For In On At"
        " To Of As With From By Mr Mrs Miss Sir Dr God One Two All Some Let Do Did Is Are Was Were"
        " Have Has Had Will Would Shall Should Can Could May Might Must Come Go Here Once Still Just"
        " Even After Before While Nothing Never Perhaps Only Indeed Good"
    )
)
_STORY = (
    "Tell me a story about {}.", "Tell me a story about {}", "tell me a story about {}",
    "Write a short story about {}.", "Please tell me a tale about {}.", "Tell me about {}.",
    "Can you tell me a story about {}?", "I would like to hear about {}.", "Write about {}.",
)  # fmt: skip
_ANY_STORY = (
    "Tell me a story.", "Tell me a story", "tell me a story", "Please tell me a story.",
    "Can you tell me a story?", "Write a short story.", "I want to hear a story.",
    "Once upon a time", "Tell me a fairy tale.", "Begin a story.",
)  # fmt: skip
# How a tale begins, as opposed to a chapter in the middle of a novel.
_OPENING = re.compile(r"Once|Long|There (was|were|lived|once)|In (the|a|olden)|A |An |One |Many ")
_NEXT = (
    "What happened next?", "What happened then?", "And then?", "Go on.", "Please go on.",
    "What happens next?", "Continue.", "Tell me more.", "And what happened after that?",
)  # fmt: skip
_CONTINUE = ("Continue: {}", "Continue this story: {}", "Go on from here: {}", "{}")
_TITLE = ("Tell me the story of {}.", "Tell me {}.", "Do you know the story called {}?", "{}")
_GREETING = ("Hello", "Hello!", "Hi", "Hi there!", "Good morning.", "Good evening!", "How are you?")
_GREETING_ANSWER = (
    "Good day to you! Shall I tell you a story?",
    "Hello, and welcome. I know many old tales; which would you like to hear?",
    "I am very well, thank you. Would you like to hear a story?",
    "Good day! Tell me what the story should be about, and I will begin.",
)
_WHO = ("Who are you?", "What are you?", "What is your name?", "What can you do?")
_WHO_ANSWER = (
    "I am a little teller of tales, made from old books. Ask me for a story.",
    "I am a very small language model. I have read a hundred old books, and I can tell stories.",
    "I am a teller of old tales. Tell me what you would like to hear about.",
)
_THANKS = ("Thank you.", "Thank you!", "Thanks", "That was a good story.")
_THANKS_ANSWER = ("You are very welcome.", "I am glad that you liked it. Shall I tell you another?")


def passage(paragraphs: list[str], start: int, low: int, high: int) -> int:
    """End of the passage from `start`: at least `low` characters, `high` only if it must."""
    size, end = 0, start
    while end < len(paragraphs) and size < low:
        if end > start and size + len(paragraphs[end]) > high:
            break
        size += len(paragraphs[end])
        end += 1
    return end


def subject(text: str, rng: random.Random) -> str | None:
    """A name or noun that occurs at least twice in `text`, as it would stand in a request."""
    names = Counter(re.findall(r"(?<=[a-z,] )(?:[A-Z][a-z]{2,}(?: [A-Z][a-z]{2,})?)", text))
    candidates = [name for name, n in names.items() if n >= 2 and name.split()[0] not in _COMMON]
    words = Counter(_PLURAL.get(word, word) for word in re.findall(r"[a-z]+", text.lower()))
    for noun in _NOUNS:
        if words[noun] >= 2:
            article = "an" if noun[0] in "aeiou" else "a"
            candidates.append("children" if noun == "children" else f"{article} {noun}")
    return rng.choice(candidates) if candidates else None


def _excerpt(rng: random.Random, title: str, paragraphs: list[str]) -> str:
    """One conversation from a section, of one to three exchanges."""
    at_start = rng.random() < 0.25
    start = 0 if at_start else rng.randrange(len(paragraphs))
    whole = sum(map(len, paragraphs)) < 1800
    end = passage(paragraphs, start, rng.choice((250, 500, 900)), 1500)
    if whole and at_start:
        end = len(paragraphs)
    text = "\n\n".join(paragraphs[start:end])
    named = at_start and len(title) > 3 and not re.match(r"(chapter|[IVXLC]+\b|part|\d)", title, re.I)
    about = subject(text, rng)
    tale = at_start and _OPENING.match(text) is not None
    if named and rng.random() < 0.5:
        request = rng.choice(_TITLE).format(title)
    elif tale and rng.random() < 0.6:
        request = rng.choice(_ANY_STORY)
    elif about and rng.random() < 0.75:
        request = rng.choice(_STORY).format(about)
    else:
        cut = re.match(r".{20,160}?(?<!Mr)(?<!Mrs)(?<!Dr)(?<!St)[.!?]\"?\s", text, re.DOTALL)
        if cut is None or len(text) - cut.end() < 80:
            request = rng.choice(_STORY).format(about or "something that happened")
        else:
            request, text = rng.choice(_CONTINUE).format(cut[0].strip()), text[cut.end() :]
    messages = [request, text]
    while end < len(paragraphs) and len(messages) < 6 and rng.random() < 0.45:
        begin, end = end, passage(paragraphs, end, rng.choice((250, 500)), 1200)
        messages += [rng.choice(_NEXT), "\n\n".join(paragraphs[begin:end])]
    if rng.random() < 0.05:
        messages += [rng.choice(_THANKS), rng.choice(_THANKS_ANSWER)]
    if rng.random() < 0.05:
        messages = [rng.choice(_GREETING), rng.choice(_GREETING_ANSWER), *messages]
    return turns(*messages)


def conversations(sections: list[tuple[str, list[str]]], characters: int, rng: random.Random) -> list[str]:
    """Rendered conversations of about `characters` in all, from sections drawn by length^0.5
    (short tales, which have an ending, come up more often than their share)."""
    weights = [sum(map(len, paragraphs)) ** 0.5 for _, paragraphs in sections]
    made: list[str] = []
    size = 0
    while size < characters:
        if rng.random() < 0.02:
            greet = rng.random() < 0.5
            pair = (_GREETING, _GREETING_ANSWER) if greet else (_WHO, _WHO_ANSWER)
            made.append(turns(rng.choice(pair[0]), rng.choice(pair[1])))
        else:
            made.append(_excerpt(rng, *rng.choices(sections, weights)[0]))
        size += len(made[-1])
    return made
