"""What the router needs of a checkpoint: its text side and a few facts. No weights, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from router.text.template import ChatTemplate
from router.text.tokenizer import TextTokenizer
from shared.errors import UnknownModel
from shared.models.facts import ModelFacts, read_facts
from shared.models.fingerprint import tokenizer_digest


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """name: what clients call the model. tokenizer_digest: must equal that of every worker."""

    name: str
    tokenizer: TextTokenizer
    template: ChatTemplate
    facts: ModelFacts
    tokenizer_digest: str

    @classmethod
    def load(cls, folder: Path, name: str) -> Checkpoint:
        """Takes about a second. Raises ModelError, BadTokenizer or BadTemplate."""
        return cls(
            name=name,
            tokenizer=TextTokenizer.load(folder),
            template=ChatTemplate.load(folder),
            facts=read_facts(folder),
            tokenizer_digest=tokenizer_digest(folder),
        )

    def check_name(self, asked: str | None) -> None:
        """Raises UnknownModel if a request names another model."""
        if asked is not None and asked != self.name:
            raise UnknownModel("The model that the request names is not served here.", param="model")

    def max_model_len(self, of_workers: int | None) -> int:
        """Longest prompt plus answer: the checkpoint's, or less if the workers have less."""
        longest = self.facts.max_position_embeddings
        return longest if of_workers is None else min(longest, of_workers)
