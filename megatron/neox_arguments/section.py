"""What all sections of arguments share: frozen, strict about types, and documented field by field."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class Section(BaseModel):
    """A group of arguments. The text under a field is its documentation: unit, allowed values, consequence."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


# Default of a whole number that is worked out where the user does not set it; every other value is at least 1.
DERIVED = 0


# Larger counts fit no tensor, file or port; without a bound they would overflow the arithmetic on them.
_LARGEST = 2**63 - 1


def whole_number(value: Any) -> Any:
    """Take `1e3` for 1000, as YAML reads it; anything that is not a whole number is left to be refused."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


PositiveInt = Annotated[int, BeforeValidator(whole_number), Field(ge=1, le=_LARGEST)]
NonNegativeInt = Annotated[int, BeforeValidator(whole_number), Field(ge=0, le=_LARGEST)]
Probability = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
NonNegativeFloat = Annotated[float, Field(ge=0.0)]
