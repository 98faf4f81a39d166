"""How a question is answered: from whole documents or from found passages, decided by the server and shown."""

from query.modes.gather import Modes

__all__ = ["Modes"]
