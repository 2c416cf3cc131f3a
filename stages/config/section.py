"""The base classes of the settings, and the one-line error about a wrong value."""

import inspect
from copy import copy
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo
from typing_extensions import Self

from stages.config.errors import UserError, unknown

# The largest number of rows, tokens or updates. Above it torch and C would overflow.
MOST = 2**31 - 1
# The types of most settings, whose range is part of the type.
PositiveInt = Annotated[int, Field(gt=0, le=MOST)]
NonNegativeInt = Annotated[int, Field(ge=0, le=MOST)]
PositiveFloat = Annotated[float, Field(gt=0, le=MOST)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=MOST)]
Fraction = Annotated[float, Field(ge=0, le=1)]

# pydantic's kinds of errors, each as the end of a sentence that begins with "<setting> must".
MUST = {
    "greater_than": "be above {gt}",
    "greater_than_equal": "be at least {ge}",
    "less_than": "be below {lt}",
    "less_than_equal": "be at most {le}",
    "literal_error": "be {expected}",
    "finite_number": "be a finite number",
    "int_type": "be a whole number",
    "float_type": "be a number",
    "bool_type": "be true or false",
    "string_type": "be text",
}


class Settings(BaseModel):
    """Frozen settings whose values are checked when they are created.

    The docstring under a field is its description, which `make settings` prints. A value has
    exactly the type of its field, so the text "3" is not a number; a whole number may stand for a
    float.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    def __init__(self, **values: Any) -> None:
        """Check the values. Raises UserError for the first wrong one, in one line."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise type(self)._in_one_line(error) from None

    def changed(self, **values: Any) -> Self:
        """Return a copy with other values, which are checked; `model_copy` checks nothing."""
        return type(self)(**{**dict(self), **values})

    @classmethod
    def key(cls, field: str) -> str:
        """Return how messages name a field."""
        return field

    @classmethod
    def _in_one_line(cls, error: ValidationError) -> UserError:
        first, *others = error.errors(include_url=False)
        context = first.get("ctx", {})
        key = cls.key(".".join(map(str, first["loc"])))

        if first["type"] == "value_error":  # raised by our own validators, which name the field
            line = str(context["error"])
        elif first["type"] == "extra_forbidden":
            line = str(unknown("setting", key, map(cls.key, cls.model_fields)))
        elif first["type"] in MUST:
            bounds = {name: plain_number(bound) for name, bound in context.items()}
            must = MUST[first["type"]].format(**bounds)
            line = f"{key} must {must}, not {repr(first['input'])[:60]}"
        else:
            line = f"{key}: {first['msg']}"

        if others:
            line += f"; and {len(others)} more"
        return UserError(line)


def plain_number(bound: Any) -> str:
    """Return a bound as a person would write it: 1 instead of 1.0."""
    return str(int(bound)) if isinstance(bound, float) and bound.is_integer() else str(bound)


class Section(Settings):
    """A section of a run's settings."""

    @classmethod
    def section(cls) -> str:
        """Return how settings name it: `JudgeSettings` is `judge`."""
        return cls.__name__.removesuffix("Settings").lower()

    @classmethod
    def key(cls, field: str) -> str:
        """Return how messages and the command line name a field, such as `ppo.kl_coef`."""
        return f"{cls.section()}.{field}"

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Let a subclass change only a default, by `batch_size: int = 128`.

        pydantic would take that for a new field and drop the range and the description that the
        field has in the parent class.
        """
        super().__pydantic_init_subclass__(**kwargs)
        inherited: dict[str, FieldInfo] = {}
        for parent in reversed(cls.__mro__[1:]):
            if issubclass(parent, Section):
                inherited |= parent.model_fields

        redefined = inspect.get_annotations(cls).keys() & inherited.keys()
        for name in redefined:
            field = copy(cls.model_fields[name])
            field.metadata = field.metadata or inherited[name].metadata  # the range
            field.description = field.description or inherited[name].description
            cls.__pydantic_fields__[name] = field
        if redefined:
            cls.model_rebuild(force=True)
