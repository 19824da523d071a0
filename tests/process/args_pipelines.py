"""A pipeline with a model of its args, which costs each worker megabytes."""

from pydantic import BaseModel, Field

from dataloader.pipelines import register


class Load(BaseModel):
    day: str
    limit: int = Field(default=10, ge=1)
    password: str | None = None


@register("typed", args=Load)
def typed(args: Load) -> str:
    return args.day
