"""A plugin of pytest's: whatever runs with it has kvd in the place of SGLang's file backend."""

from tests.sglang import absent

absent.install()

from tests.sglang import kits  # noqa: E402 - SGLang can be imported only now

kits.install()
