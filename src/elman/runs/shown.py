"""What a run shows of itself: samples of its writing on the way, and the weights it is known by."""

from dataclasses import dataclass
from typing import Any

from elman.options import check, option

PANEL = "Samples"
WEIGHTS = ("best", "last")


@dataclass(frozen=True)
class Shown:
    """Which weights score and write unless others are asked for, and what is sampled when.

    `best` on the held-out text is what one wants of a model that shall do well on other texts;
    `last` is for a recipe that goes on until it knows its text by heart, as the notes' does: there
    the best are nearly untrained.
    """

    weights: str = option(
        "best", "Of the run, by validation or the end", panel=PANEL, choices=WEIGHTS, later=True
    )
    sample_every: int = option(
        0, "Passes between samples; 0: now and then", panel=PANEL, at_least=0, later=True
    )
    sample_prompt: str = option("", "What a sample begins with", panel=PANEL, later=True)
    sample_length: int = option(240, "Tokens of a sample", panel=PANEL, at_least=1, later=True)
    sample_temperature: float = option(
        0.8, "Of a sample; 0: the likeliest token", panel=PANEL, at_least=0, later=True
    )

    def __post_init__(self) -> None:
        check(self)

    @property
    def sampling(self) -> dict[str, Any]:
        """How `generation.specimen` writes, besides the prompt."""
        return {"length": self.sample_length, "temperature": self.sample_temperature}

    def words(self) -> str:
        """How samples are drawn, for people.

        >>> Shown().words()
        'From nothing, at temperature 0.8, every time with the same seed.'
        """
        begin = f"From “{self.sample_prompt}”" if self.sample_prompt else "From nothing"
        if self.sample_temperature == 0:
            return f"{begin}, always the likeliest token."
        return (
            f"{begin}, at temperature {self.sample_temperature:g}, every time with the same seed."
        )
