"""The Hugging Face token in a Juju secret."""

import collections.abc
import re

from ddp.problem import ParameterError

OPTION = "hf-token"
MAX_CHARACTERS = 4096


def parse(content: collections.abc.Mapping[str, str] | None, app: str) -> str:
    """Read the token of a secret, None if out of reach.

    Raises ParameterError, without the token.
    """
    if content is None:
        raise ParameterError(
            OPTION, f"juju grant-secret NAME {app}: the secret does not exist or is not granted"
        )
    again = "juju update-secret NAME token=hf_..."
    token = content.get("token")
    if token is None:
        raise ParameterError(OPTION, f"{again}: the secret has no key token")
    if not re.fullmatch(r"[!-~]+", token, re.ASCII):
        what = "is empty" if not token else "has blanks or is not ASCII"
        raise ParameterError(OPTION, f"{again}: the secret's token {what}")
    if len(token) > MAX_CHARACTERS:
        raise ParameterError(
            OPTION,
            f"{again}: the secret's token has {len(token)} characters, at most {MAX_CHARACTERS}",
        )
    return token
