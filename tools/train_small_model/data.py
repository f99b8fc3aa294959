"""Token files from a folder of cleaned books (see clean.py and works.json).

    python data.py --corpus DIR --heldout heldout.txt --out TOKENS

checks every book against its sha256, sets one section in a hundred aside for validation, trains
the tokenizer on the rest and writes uint16 little-endian token streams: ``plain.bin`` (sections
as ``<|endoftext|>title, text``), ``chat.bin`` (conversations), ``valid.bin``, ``heldout.bin``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from pathlib import Path

import chat
import clean
import numpy as np
import tokenizer as bpe
from model import Config

Section = tuple[str, list[str]]


def load(corpus: Path, any_edition: bool) -> list[Section]:
    """Sections of all books of ``works.json`` in `corpus`, in the order of the list."""
    works = json.loads(Path(__file__).with_name("works.json").read_text(encoding="utf-8"))
    sections: list[Section] = []
    for work in works:
        text = (corpus / work["file"]).read_text(encoding="utf-8")
        digest = hashlib.sha256(text.encode()).hexdigest()
        if digest != work["sha256"] and not any_edition:
            raise SystemExit(
                f"{work['file']}: sha256 {digest}, expected {work['sha256']}: another edition of"
                f" {work['title']}? --any-edition accepts it"
            )
        sections += clean.parse(text)
    return sections


def is_validation(section: Section) -> bool:
    """One section in a hundred, by a hash of its text."""
    digest = hashlib.sha256("\n\n".join(section[1]).encode()).digest()
    return digest[0] * 256 + digest[1] < 655


def plain(section: Section) -> str:
    title, paragraphs = section
    return bpe.END_OF_TEXT + "\n\n".join([title, *paragraphs] if title else paragraphs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--heldout", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--chat-characters", type=int, default=12_000_000)
    parser.add_argument("--any-edition", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    config = Config()
    rng = random.Random(arguments.seed)
    sections = load(arguments.corpus, arguments.any_edition)
    valid = [section for section in sections if is_validation(section)]
    kept = [section for section in sections if not is_validation(section)]
    rng.shuffle(kept)
    arguments.out.mkdir(parents=True, exist_ok=True)
    tokenizer = bpe.train(("\n\n".join(p) for _, p in kept), config.vocab_size)
    bpe.write(tokenizer, arguments.out, config.max_position_embeddings)

    heldout = arguments.heldout.read_text(encoding="utf-8")
    talk = chat.conversations(kept, arguments.chat_characters, rng)
    streams = {
        "plain": [plain(section) for section in kept],
        "chat": [bpe.END_OF_TEXT + conversation for conversation in talk],
        "valid": [plain(section) for section in valid],
        "heldout": [heldout],
    }
    counts: dict[str, int] = {}
    for name, texts in streams.items():
        encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
        ids = np.concatenate([np.array(e.ids, dtype="<u2") for e in encoded])
        ids.tofile(arguments.out / f"{name}.bin")
        counts[name] = len(ids)
    meta = {
        "config": config.to_dict(),
        "special": {
            "eos": tokenizer.token_to_id(bpe.TURN_END),
            "pad": tokenizer.token_to_id(bpe.END_OF_TEXT),
        },
        "tokens": counts,
        "heldout_bytes": len(heldout.encode()),
        "sections": {"train": len(kept), "valid": len(valid), "conversations": len(talk)},
    }
    (arguments.out / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(meta["tokens"]))


if __name__ == "__main__":
    main()
