"""What goes wrong when PTX is executed, three ways."""


class PtxError(Exception):
    """The text, or the way it was launched, makes no sense."""


class Unsupported(PtxError):
    """An instruction, or a form of one, that the emulator does not know. Never skipped."""


class Fault(PtxError):
    """The kernel did something wrong. `instruction` is its PTX text, `place` the "file:line" it came from (or "")."""

    def __init__(self, message, instruction="", place=""):
        super().__init__(message + (f"\n  in `{instruction}`" if instruction else "") +
                         (f" ({place})" if place else ""))
        self.instruction, self.place = instruction, place
