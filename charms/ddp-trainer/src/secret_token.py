"""The Hugging Face token in a Juju secret."""

import collections.abc
import re

from ddp.base import ParameterError

OPTION = "hf-token"
MAX_CHARACTERS = 4096


def parse(content: collections.abc.Mapping[str, str] | None, app: str) -> str:
    """Read the token in a secret's content, None if it is out of reach. Raises ParameterError, without the token."""
    if content is None:
        raise ParameterError(OPTION, f"the secret does not exist or is not granted: juju grant-secret NAME {app}")
    again = "juju update-secret NAME token=hf_..."
    token = content.get("token")
    if token is None:
        raise ParameterError(OPTION, f"the secret has no key token: {again}")
    if not re.fullmatch(r"[!-~]+", token, re.ASCII):
        what = "is empty" if not token else "has blanks, line breaks or characters that are not ASCII"
        raise ParameterError(OPTION, f"the secret's token {what}: {again}")
    if len(token) > MAX_CHARACTERS:
        raise ParameterError(
            OPTION, f"the secret's token has {len(token)} characters, at most {MAX_CHARACTERS}: {again}"
        )
    return token
