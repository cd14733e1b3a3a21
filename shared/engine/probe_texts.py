"""Texts to measure a model with: of different kinds, each some 200 tokens long (several groups of quantised KV)."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

PROBE_TEXTS = (
    """The first steam engines pumped water out of mines. Thomas Newcomen's machine of 1712 let steam into a
cylinder and then cooled it with a jet of cold water; the pressure of the air pushed the piston down. Most
of the heat was lost, because the same cylinder was heated and cooled at every stroke. In 1765 James Watt
had the thought that made his name: let the steam condense in a vessel of its own, which is always cold, and
keep the cylinder always hot. His engines burned a quarter of the coal. With Matthew Boulton he built
hundreds of them, and asked for no price but a third of the coal that their owners saved. By 1800 they drove
mills, forges and breweries all over Britain, and thirty years later trains ran between Liverpool and
Manchester. The word horsepower is his as well: it told a brewer how many animals a machine would replace.
In short, Watt did not invent the steam engine, but""",
    '''from collections.abc import Iterator


class Interval:
    """A half-open range of integers."""

    def __init__(self, start: int, end: int) -> None:
        if end < start:
            raise ValueError("an interval cannot end before it starts")
        self.start = start
        self.end = end

    def __len__(self) -> int:
        return self.end - self.start

    def __contains__(self, value: int) -> bool:
        return self.start <= value < self.end

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.end))

    def overlaps(self, other: "Interval") -> bool:
        """Whether the two have an integer in common."""
        return self.start < other.end and other.start < self.end

    def union(self, other: "Interval") -> "Interval":
        """The smallest interval that holds both."""
        return Interval(min(self.start, other.start),''',
    """Question: A shop sells pencils at 3 for 2 euros and notebooks at 4 euros each. Anna buys 12 pencils and 5
notebooks and pays with a note of 50 euros. How much does she get back?
Answer: 12 pencils are 4 times 3 pencils, so they cost 4 * 2 = 8 euros. 5 notebooks cost 5 * 4 = 20 euros. Together
that is 8 + 20 = 28 euros. She gets 50 - 28 = 22 euros back.

Question: A train leaves at 9:40 and arrives at 13:05. It stops 4 times for 5 minutes each. How long does it move?
Answer: From 9:40 to 13:05 it is 3 hours and 25 minutes, which is 205 minutes. The stops take 4 * 5 = 20 minutes. So
the train moves for 205 - 20 = 185 minutes, which is 3 hours and 5 minutes.

Question: A garden is 12 metres long and 7 metres wide. A fence around it costs 15 euros a metre. What does it cost?
Answer:""",
    """Lieber Herr Berger,

vielen Dank für Ihre Nachricht vom 3. Mai. Wir haben die Lieferung geprüft: Von den 240 bestellten Lampen
sind 228 angekommen, zwei davon mit gebrochenem Glas. Die fehlenden zwölf Stück und den Ersatz für die
beschädigten schicken wir noch diese Woche auf unsere Kosten. Bitte bewahren Sie die beschädigten Lampen
auf, bis unser Fahrer sie abholt.

Dear Ms. Carter,

thank you for your order. 私たちは来週の火曜日に発送します。 The invoice is attached; please pay within 30 days.
If you have any questions, you can reach us by phone on weekdays from 9 to 17 o'clock, or by e-mail at any time. We
would also like to""",
)


def tokenise(text: str, folder: Path) -> list[int]:
    """Token ids by the tokenizer of a checkpoint folder, without any that mark a beginning or an end."""
    ids: list[int] = (
        Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    )
    return ids
