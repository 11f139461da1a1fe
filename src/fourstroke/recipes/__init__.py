"""Recipes: functions that return a whole configuration. A variant is a few lines on top of another."""

from collections.abc import Callable

from fourstroke.config import RunConfig
from fourstroke.recipes.quickstart import quickstart

RECIPES: dict[str, Callable[[], RunConfig]] = {"quickstart": quickstart}

__all__ = ["RECIPES", "quickstart"]
