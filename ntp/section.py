"""What every section of the configuration is made of: a strict base class and the types of its numbers."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

_MOST = 10**12
"""Of anything that is counted: steps times the sequences of a batch still fit into 64 bits."""

Positive = Annotated[int, Field(ge=1, le=_MOST)]
Count = Annotated[int, Field(ge=0, le=_MOST)]
PositiveFloat = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Ratio = Annotated[float, Field(ge=0, le=1)]
MultipleOf16 = Annotated[int, Field(ge=16, le=_MOST, multiple_of=16)]
Timeout = Annotated[float, Field(ge=1, le=1e8)]
"""Seconds. Launcher and workers look at each other about ten times a second, and a look may be late."""


class Section(BaseModel):
    """Base of every section: immutable, strict types, unknown keys refused."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)
