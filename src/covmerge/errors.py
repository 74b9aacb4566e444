"""The public path of covmerge's errors."""

from covmerge.base.errors import *  # noqa: F403
