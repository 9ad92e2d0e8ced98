"""`cupy.cuda.compiler`: how a kernel's source fails to compile."""


class CompileException(Exception):
    """`str()` of it is the compiler's message."""

    def __init__(self, msg: str, source: str, name: str, options: tuple[str, ...]) -> None:
        super().__init__(msg)
        self._msg = msg
        self.source = source
        self.name = name
        self.options = options

    def get_message(self) -> str:
        return self._msg
