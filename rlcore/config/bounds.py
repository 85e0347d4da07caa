"""Types of settings, with their bounds."""

from __future__ import annotations

from typing import Annotated

from rlcore.strict_config import Above, AtLeast, Below, Between

Scalar = str | int | float | bool

PositiveInt = Annotated[int, AtLeast(1)]
NonNegativeInt = Annotated[int, AtLeast(0)]
PositiveFloat = Annotated[float, Above(0.0)]
NonNegativeFloat = Annotated[float, AtLeast(0.0)]
Duration = Annotated[float, Above(0.0), Below(1e6)]  # in seconds or minutes; clocks and locks have a largest wait
Fraction = Annotated[float, Between(0.0, 1.0)]
Decay = Annotated[float, AtLeast(0.0), Below(1.0)]  # of a running average
