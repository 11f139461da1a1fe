"""Between messages and tokens: rendering a prompt, and cutting an episode into training rows."""

from fourstroke.tokens.render import Renderer
from fourstroke.tokens.rows import episode_rows, num_shared

__all__ = ["Renderer", "episode_rows", "num_shared"]
