"""What every part of a recipe is: keys that are known, and nothing that changes."""

from pydantic import BaseModel, ConfigDict


class StrictModel(BaseModel):
    """A part of a recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True)
