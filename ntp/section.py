"""What every section of the configuration is made of: a strict base class and the types of its numbers."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Ratio = Annotated[float, Field(ge=0, le=1)]
MultipleOf16 = Annotated[int, Field(ge=16, multiple_of=16)]


class Section(BaseModel):
    """Base of every section: immutable, strict types, unknown keys refused."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)
